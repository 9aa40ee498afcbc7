"""What the model finds at an evaluation, kept in the run folder so that a page can show how it changes.

A snapshot is a small JSON file beside thumbnails: some captions with their best pictures, a similarity matrix, the
worst confusions. The captions are the same at each evaluation; the number of snapshots is bounded.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from m1clip.data.prepare import Split
from m1clip.evaluate.analysis import confusions, even_indices
from m1clip.evaluate.dataset import Features
from m1clip.evaluate.ranks import is_match, nearest, ranks
from m1clip.files import read_small, write_bytes, write_text
from m1clip.train.insight import caption_of

FOLDER, THUMBS = "watch", "thumbs"
QUERIES, FOUND, MATRIX, CONFUSIONS = 8, 5, 24, 6
KEEP = 24  # snapshots of a run
THUMB = 72  # pixels
LONGEST = 300  # letters of a caption


def write_snapshot(run: Path, step: int, split: str, data: Split, features: Features) -> None:
    """One more snapshot; old ones are thinned out, and thumbnails that none shows any more deleted."""
    content = {
        "step": step,
        "split": split,
        "pictures": len(features.image),
        "queries": _queries(data, features),
        "matrix": _matrix(data, features.image, features.text),
        "confusions": _confusions(data, features),
    }
    folder = run / FOLDER
    for part in (folder, folder / THUMBS):
        part.mkdir(exist_ok=True)
    for picture in _pictures(content):
        _write_thumb(folder / THUMBS / f"{picture}.jpg", data, picture)
    write_text(
        folder / f"step-{step:08d}.json", json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    )
    _thin_out(folder, step)


def _queries(data: Split, features: Features) -> list[dict[str, Any]]:
    image, text, owner, keys, _ = features
    chosen = even_indices(len(text), QUERIES)
    scores, found = nearest(text[chosen], image, FOUND)
    correct = is_match(found, keys[chosen][:, None], owner, keys)
    # Every caption equal to a chosen one is needed: it tells which other images are right.
    asked = torch.isin(keys, keys[chosen]).nonzero()[:, 0]
    place = ranks(image, text[asked], owner[asked], keys[asked]).text_to_image[
        torch.searchsorted(asked, chosen)
    ]
    return [
        {
            "caption": caption_of(data, int(caption))[:LONGEST],
            "right": int(owner[caption]),
            "rank": int(place[row]),
            "found": found[row].tolist(),
            "correct": correct[row].tolist(),
            "scores": [round(score, 3) for score in scores[row].tolist()],
        }
        for row, caption in enumerate(chosen)
    ]


def _matrix(data: Split, image: Tensor, text: Tensor) -> dict[str, Any]:
    """Pictures against the first caption of each: the diagonal is right."""
    pictures = even_indices(len(image), MATRIX)
    captions = [int(data.captions.first[int(picture)]) for picture in pictures]
    values = image[pictures].float() @ text[captions].float().T
    return {
        "pictures": pictures.tolist(),
        "captions": [caption_of(data, caption)[:LONGEST] for caption in captions],
        "values": [[round(value, 3) for value in row] for row in values.tolist()],
    }


def _confusions(data: Split, features: Features) -> list[dict[str, Any]]:
    return [
        {
            "caption": caption_of(data, each.caption)[:LONGEST],
            "found": each.found,
            "right": each.right,
            "margin": round(each.margin, 3),
            "truth": data.pairs[each.found].captions[0][:LONGEST],
        }
        for each in confusions(*features[:4], most=CONFUSIONS)
    ]


def _pictures(content: dict[str, Any]) -> set[int]:
    """Every picture that a snapshot shows."""
    shown = set(content["matrix"]["pictures"])
    for query in content["queries"]:
        shown |= {query["right"], *query["found"]}
    for each in content["confusions"]:
        shown |= {each["found"], each["right"]}
    return shown


def _write_thumb(path: Path, data: Split, picture: int) -> None:
    if path.exists():
        return
    small = Image.fromarray(data.pictures.read(np.array([picture]))[0])
    small.thumbnail((THUMB, THUMB))
    coded = io.BytesIO()
    small.save(coded, format="JPEG", quality=82)
    write_bytes(path, coded.getvalue(), sync=False)  # whole after a kill; not worth a wait for the disk


def _thin_out(folder: Path, step: int) -> None:
    kept = sorted(folder.glob("step-*.json"))
    for stale in [path for path in kept if int(path.stem[5:]) > step]:
        stale.unlink()  # of a session that was killed after its last checkpoint
        kept.remove(stale)
    if len(kept) <= KEEP:
        return
    for path in kept[1:-1:2]:
        path.unlink()
    shown: set[int] = set()
    for path in folder.glob("step-*.json"):
        shown |= _pictures(json.loads(read_small(path)))
    _remove(thumb for thumb in (folder / THUMBS).glob("*.jpg") if int(thumb.stem) not in shown)


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
