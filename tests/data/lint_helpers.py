"""Helpers of the lint tests."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
from PIL import Image

from m1clip.data.lint import LintReport


def photo(seed: int, size: tuple[int, int] = (96, 64)) -> Image.Image:
    """Random shapes: no two look alike."""
    small = np.random.default_rng(seed).integers(0, 255, (6, 9, 3), np.uint8)
    return Image.fromarray(small).resize(size, Image.Resampling.BICUBIC)


def saved(image: Image.Image, kind: str = "JPEG", **more: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **more)
    return stream.getvalue()


def make(folder: Path, files: dict[str, bytes], rows: list[tuple[str, str, str]] | None = None) -> Path:
    """A table over files; without rows, each file has its own caption and is in train, the last in val."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / "images" / name).write_bytes(data)
    names = list(files)
    if rows is None:
        rows = [(n, f"a sentence about {n[:-4]} here", "val" if n == names[-1] else "train") for n in names]
    lines = [json.dumps({"image": n, "caption": c, "split": s}) for n, c, s in rows]
    (folder / "captions.jsonl").write_text("\n".join(lines))
    return folder


def good(count: int, start: int = 0) -> dict[str, bytes]:
    return {f"p{n}.jpg": saved(photo(n)) for n in range(start, start + count)}


def counts(report: LintReport) -> dict[str, int]:
    return {found.code: found.count for found in report.findings}


def of(report: LintReport, code: str) -> tuple[str, ...]:
    return next(found.examples for found in report.findings if found.code == code)
