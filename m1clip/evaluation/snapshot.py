"""Examples for the monitor and report: retrieved images, a similarity matrix and confusions, with thumbnails."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from m1clip.data.prepare import Split
from m1clip.evaluation.analysis import confusions, even_indices
from m1clip.evaluation.evaluate import caption_text
from m1clip.evaluation.retrieval import is_match, nearest, ranks
from m1clip.inference.encoder import SplitFeatures
from m1clip.io import write_bytes, write_text

FOLDER, THUMBNAILS = "snapshots", "thumbnails"
QUERIES, RETRIEVED, MATRIX, CONFUSIONS = 8, 5, 24, 6
MAX_SNAPSHOTS = 24  # per run
THUMBNAIL_SIDE = 72
MAX_CAPTION = 300  # characters


def write_snapshot(run: Path, step: int, split: str, data: Split, features: SplitFeatures) -> None:
    """Write a snapshot of this step, and delete some of the old ones."""
    content = {
        "step": step,
        "split": split,
        "images": len(features[0]),
        "queries": _queries(data, features),
        "matrix": _matrix(data, features[0], features[1]),
        "confusions": _confusions(data, features),
    }
    folder = run / FOLDER
    (folder / THUMBNAILS).mkdir(parents=True, exist_ok=True)
    for image in _shown_images(content):
        path = folder / THUMBNAILS / f"{image}.jpg"
        if not path.exists():
            small = Image.fromarray(data.images.read(np.array([image]))[0])
            small.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
            encoded = io.BytesIO()
            small.save(encoded, format="JPEG", quality=82)
            write_bytes(path, encoded.getvalue(), sync=False)  # atomic, but without waiting for the disk
    write_text(folder / f"step-{step:08d}.json", json.dumps(content, ensure_ascii=False, separators=(",", ":")))
    thin_out(folder, step)


def _caption(data: Split, caption: int) -> str:
    return caption_text(data, caption)[:MAX_CAPTION]


def _queries(data: Split, features: SplitFeatures) -> list[dict[str, Any]]:
    image, text, image_index, keys, _ = features
    chosen = even_indices(len(text), QUERIES)
    scores, found = nearest(text[chosen], image, RETRIEVED)
    correct = is_match(found, keys[chosen][:, None], image_index, keys)
    # All captions equal to a chosen one, because their images are right as well.
    asked = torch.isin(keys, keys[chosen]).nonzero()[:, 0]
    rank = ranks(image, text[asked], image_index[asked], keys[asked]).text_to_image[torch.searchsorted(asked, chosen)]
    return [
        {
            "caption": _caption(data, int(caption)),
            "right": int(image_index[caption]),
            "rank": int(rank[row]),
            "found": found[row].tolist(),
            "correct": correct[row].tolist(),
            "scores": _rounded(scores[row]),
        }
        for row, caption in enumerate(chosen)
    ]


def _matrix(data: Split, image: Tensor, text: Tensor) -> dict[str, Any]:
    """Similarity of images and the first caption of each: the diagonal is right."""
    images = even_indices(len(image), MATRIX)
    captions = data.captions.first[images.numpy()].tolist()
    return {
        "images": images.tolist(),
        "captions": [_caption(data, caption) for caption in captions],
        "values": [_rounded(row) for row in image[images].float() @ text[captions].float().T],
    }


def _confusions(data: Split, features: SplitFeatures) -> list[dict[str, Any]]:
    return [
        {
            "caption": _caption(data, each.caption),
            "found": each.found,
            "right": each.right,
            "margin": round(each.margin, 3),
            "truth": data.samples[each.found].captions[0][:MAX_CAPTION],
        }
        for each in confusions(*features[:4], limit=CONFUSIONS)
    ]


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 3) for value in values.tolist()]


def _shown_images(content: dict[str, Any]) -> set[int]:
    shown = set(content["matrix"]["images"])
    for query in content["queries"]:
        shown |= {query["right"], *query["found"]}
    for each in content["confusions"]:
        shown |= {each["found"], each["right"]}
    return shown


def thin_out(folder: Path, step: int) -> None:
    """Delete snapshots after `step` (written before a resume) and, above the limit, every second one."""
    kept = sorted(folder.glob("step-*.json"))
    for stale in [path for path in kept if int(path.stem[5:]) > step]:
        stale.unlink()
        kept.remove(stale)
    for path in kept[1:-1:2] if len(kept) > MAX_SNAPSHOTS else []:
        path.unlink()
