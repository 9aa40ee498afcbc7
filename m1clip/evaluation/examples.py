"""Examples of an evaluation, for the monitor and as an image: queries, similarities, confusions."""

from __future__ import annotations

import io
import json
import textwrap
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from m1clip.data.prepare import Split
from m1clip.evaluation.retrieval import is_match, nearest, ranks
from m1clip.evaluation.split_analyses import confusions, even_indices
from m1clip.inference.features import SplitFeatures
from m1clip.io import write_bytes, write_text

SNAPSHOT_FOLDER = "snapshots"
THUMBNAILS = "thumbnails"
QUERIES = 8
RETRIEVED = 5
MATRIX = 24
CONFUSIONS = 8
MAX_SNAPSHOTS = 24  # per run
THUMBNAIL_SIDE = 72
MAX_SHOWN_CAPTION = 300  # characters


def write_snapshot(run: Path, step: int, split: str, data: Split, features: SplitFeatures) -> None:
    """Write a snapshot of this step, and delete some of the old ones."""
    content = {
        "step": step,
        "split": split,
        "images": len(features[0]),
        "queries": query_examples(data, features),
        "matrix": _matrix(data, features[0], features[1]),
        "confusions": confusion_examples(data, features),
    }
    folder = run / SNAPSHOT_FOLDER
    (folder / THUMBNAILS).mkdir(parents=True, exist_ok=True)
    for image in _image_indices(content):
        path = folder / THUMBNAILS / f"{image}.jpg"
        if not path.exists():
            small = Image.fromarray(data.images.read(np.array([image]))[0])
            small.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
            encoded = io.BytesIO()
            small.save(encoded, format="JPEG", quality=82)
            # Atomic, but without waiting for the disk.
            write_bytes(path, encoded.getvalue(), sync=False)
    write_text(
        folder / f"step-{step:08d}.json",
        json.dumps(content, ensure_ascii=False, separators=(",", ":")),
    )
    thin_out(folder, step)


def _caption(data: Split, caption: int) -> str:
    image = int(data.captions.image_index[caption])
    return data.samples[image].captions[caption - int(data.captions.first[image])][
        :MAX_SHOWN_CAPTION
    ]


def query_examples(data: Split, features: SplitFeatures) -> list[dict[str, Any]]:
    """Some captions, evenly spread over the split, and the images they retrieve."""
    image, text, image_index, keys, _ = features
    chosen = even_indices(len(text), QUERIES)
    scores, retrieved = nearest(text[chosen], image, RETRIEVED)
    correct = is_match(retrieved, keys[chosen][:, None], image_index, keys)
    # All captions equal to a chosen one, because their images are right as well.
    same = np.flatnonzero(np.isin(keys, keys[chosen]))
    rank_of_same = ranks(image, text[same], image_index[same], keys[same]).text_to_image
    rank = rank_of_same[np.searchsorted(same, chosen)]
    return [
        {
            "caption": _caption(data, int(caption)),
            "right": int(image_index[caption]),
            "rank": int(rank[row]),
            "found": retrieved[row].tolist(),
            "correct": correct[row].tolist(),
            "scores": _round_scores(scores[row]),
        }
        for row, caption in enumerate(chosen)
    ]


def _matrix(data: Split, image: np.ndarray, text: np.ndarray) -> dict[str, Any]:
    """Similarity of images and the first caption of each: the diagonal is right."""
    images = even_indices(len(image), MATRIX)
    captions = data.captions.first[images].tolist()
    return {
        "images": images.tolist(),
        "captions": [_caption(data, caption) for caption in captions],
        "values": [_round_scores(row) for row in image[images] @ text[captions].T],
    }


def confusion_examples(data: Split, features: SplitFeatures) -> list[dict[str, Any]]:
    """The worst confusions, each with a caption of the image that was retrieved instead."""
    return [
        {
            "caption": _caption(data, confusion.caption),
            "found": confusion.retrieved,
            "right": confusion.right,
            "margin": round(confusion.margin, 3),
            "truth": data.samples[confusion.retrieved].captions[0][:MAX_SHOWN_CAPTION],
        }
        for confusion in confusions(*features[:4], limit=CONFUSIONS)
    ]


def _round_scores(values: np.ndarray) -> list[float]:
    return [round(value, 3) for value in values.tolist()]


def _image_indices(content: dict[str, Any]) -> set[int]:
    indices = set(content["matrix"]["images"])
    for query in content["queries"]:
        indices |= {query["right"], *query["found"]}
    for confusion in content["confusions"]:
        indices |= {confusion["found"], confusion["right"]}
    return indices


def thin_out(folder: Path, step: int) -> None:
    """Delete snapshots after `step`, and every second one if there are too many.

    Those after `step` were written before a resume.
    """
    snapshots = sorted(folder.glob("step-*.json"))
    for stale in [path for path in snapshots if int(path.stem[5:]) > step]:
        stale.unlink()
        snapshots.remove(stale)
    for path in snapshots[1:-1:2] if len(snapshots) > MAX_SNAPSHOTS else []:
        path.unlink()


RIGHT = (0, 138, 92)
WRONG = (206, 44, 58)
INK = (28, 32, 38)
GRAY = (104, 112, 122)
PAPER = (255, 255, 255)
PAGE_MARGIN = 24
CELL_GAP = 14
FRAME = 5
CELL = 112
QUERY_WIDTH = 232
HEADER_HEIGHT = 66
LABEL_HEIGHT = 24
ROW_GAP = 18
QUERY_LETTERS = 32  # per line; images are drawn over what is too wide
MAX_TEXT = 1000  # longer captions do not fit a cell; bounds the time for text layout
# The built-in font has no glyph for these.
ASCII = str.maketrans(
    {"–": "-", "—": "-", "’": "'", "‘": "'", "“": '"', "”": '"', "…": "...", "→": "->"}
)


def retrieval_grid(data: Split, features: SplitFeatures, split: str, path: Path) -> None:
    """Write a PNG with captions on the left and the images they retrieve on the right."""
    rows = query_examples(data, features)
    images = [data.images.read(np.array(row["found"])) for row in rows]
    draw_grid(
        rows,
        images,
        path,
        f"{len(data.images):,} images of the {split} split: the best for each caption",
    )


def draw_grid(
    rows: Sequence[dict[str, Any]], images: Sequence[np.ndarray], path: Path, title: str
) -> None:
    """Draw queries and their images (n, side, side, 3) uint8, best first, framed by correctness."""
    side = CELL + 2 * FRAME
    columns = max(map(len, images))
    row_height = side + LABEL_HEIGHT + ROW_GAP
    width = max(2 * PAGE_MARGIN + QUERY_WIDTH + columns * (side + CELL_GAP), 560)
    canvas = Image.new(
        "RGB", (width, 2 * PAGE_MARGIN + HEADER_HEIGHT + len(rows) * row_height - ROW_GAP), PAPER
    )
    draw = ImageDraw.Draw(canvas)
    small, normal, large = (ImageFont.load_default(size) for size in (12, 14, 20))
    draw.text((PAGE_MARGIN, PAGE_MARGIN - 6), safe_text(title), fill=INK, font=large)
    legend = "Below each image: rank, cosine similarity, and whether it is an image of the caption."
    draw.text((PAGE_MARGIN, PAGE_MARGIN + 28), legend, fill=GRAY, font=normal)
    for number, row in enumerate(rows):
        top = PAGE_MARGIN + HEADER_HEIGHT + number * row_height
        lines = textwrap.wrap(
            safe_text(row["caption"]), QUERY_LETTERS, max_lines=5, placeholder="..."
        )
        query = "\n".join([*lines, f"(right image: rank {row['rank']:,})"])
        draw.multiline_text((PAGE_MARGIN, top), query, fill=INK, font=normal)
        for column, pixels in enumerate(images[number]):
            left = PAGE_MARGIN + QUERY_WIDTH + CELL_GAP + column * (side + CELL_GAP)
            color = RIGHT if row["correct"][column] else WRONG
            draw.rectangle((left, top, left + side - 1, top + side - 1), fill=color)
            image = Image.fromarray(pixels).resize((CELL, CELL), Image.Resampling.BICUBIC)
            canvas.paste(image, (left + FRAME, top + FRAME))
            # Words as well as color, for readers who cannot tell green from red.
            verdict = "right" if row["correct"][column] else "wrong"
            label = f"{column + 1}.  {row['scores'][column]:.2f}  {verdict}"
            draw.text((left + side / 2, top + side + 5), label, fill=color, font=small, anchor="ma")
    encoded = io.BytesIO()
    # 7% larger than the smallest, in a fifth of the time.
    canvas.save(encoded, format="PNG", compress_level=1)
    write_bytes(path, encoded.getvalue())


def safe_text(text: str) -> str:
    """Text that Pillow can draw: one line of bounded length without control characters."""
    text = text[:MAX_TEXT].encode("utf-8", "replace").decode("utf-8").translate(ASCII)
    return " ".join(
        "".join(" " if unicodedata.category(letter) == "Cc" else letter for letter in text).split()
    )
