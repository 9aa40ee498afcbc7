"""One run of open_clip's own training command against the clock, scored by m1clip's evaluation."""

from __future__ import annotations

import csv
import json
import random
import re
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from speedrun_own import Plan, recalls

from m1clip.data.captions import caption_ids_of
from m1clip.data.sources import open_sources
from m1clip.data.types import Source
from m1clip.evaluation.retrieval import retrieval

PEERS = Path(__file__).parent / "peers"
MODEL = "ViT-256x6-16-112"
SHAPE = {
    "embed_dim": 256,
    "vision_cfg": {"image_size": 112, "layers": 6, "width": 256, "head_width": 64, "patch_size": 16},
    "text_cfg": {"context_length": 32, "vocab_size": 49408, "width": 256, "heads": 4, "layers": 4},
}
# lr, batch and precision as in the issue; warm-up a tenth; one worker keeps the loader ahead of the step on two cores.
SETTINGS: dict[str, Any] = {
    "lr": "1e-3",
    "wd": "0.1",
    "beta1": "0.9",
    "beta2": "0.98",
    "eps": "1e-6",
    "grad-clip-norm": "1.0",
    "workers": "1",
    "save-frequency": "0",
    "log-every-n-steps": "5",
    "epochs": "1",
    "dataset-type": "csv",
    "csv-separator": "\t",
    "csv-img-key": "filepath",
    "csv-caption-key": "title",
}
PROBE_BATCHES = 8
MARGIN = 0.01  # of the time: rows are counted out beforehand, by the rate of the probe
LINE = re.compile(r"Train Epoch: \d+ \[\s*(\d+)/.*?([\d.]+)/s, ")


class OpenClip:
    """The peer in its own Python, on the same images."""

    def __init__(self, python: str, plan: Plan, batch: int = 256, precision: str = "amp_bf16") -> None:
        self.python, self.plan, self.batch, self.precision = python, plan, batch, precision
        self.source = open_sources((plan.data,))
        self.folder = plan.folder / "open_clip"
        (self.folder / "configs").mkdir(parents=True)
        (self.folder / "configs" / f"{MODEL}.json").write_text(json.dumps(SHAPE), encoding="utf-8")
        self.version = "unknown"

    def probe(self) -> tuple[float, float]:
        """(seconds before the first step and after the last, images per second): measured outside any clock."""
        seconds, rates = self._train("probe", 0, PROBE_BATCHES)
        rate = statistics.median(rates)
        return max(seconds - PROBE_BATCHES * self.batch / rate, 0.0), rate

    def train(self, seed: int, around: float, rate: float) -> dict[str, Any]:
        """One seed. The command knows epochs only: the table gets as many rows as fit, so its cosine ends in time."""
        batches = int((self.plan.seconds * (1 - MARGIN) - around) * rate / self.batch)
        if batches < 2:
            raise SystemExit(f"open_clip: set-up takes {around:.0f} s; no two batches fit, give more --minutes")
        seconds, rates = self._train(f"seed{seed}", seed, batches)
        found: dict[str, Any] = {split: self._score(f"seed{seed}", split) for split in ("val", "test")}
        return {
            "recipe": "open_clip",
            "seed": seed,
            "seconds": seconds,
            "setup_seconds": around,
            "steps": batches,
            "images_seen": batches * self.batch,
            "images_per_second": statistics.median(rates),
            "curve": [],
            "captions_per_step": 1,
            "stopped": False,
            "flags": SETTINGS | {"precision": self.precision},
            **found,
        }

    def _train(self, name: str, seed: int, batches: int) -> tuple[float, list[float]]:
        """Seconds of the complete process, and the images per second that it logged."""
        table = self.folder / f"{name}.tsv"
        write_rows(self.source, table, batches * self.batch, seed)
        settings = SETTINGS | {"model": MODEL, "train-data": table, "batch-size": self.batch, "name": name}
        settings |= {"warmup": max(1, batches // 10), "precision": self.precision, "device": self.plan.device}
        settings |= {"seed": seed, "logs": self.folder}
        words = [self.python, str(PEERS / "open_clip_cli.py"), str(self.folder / "configs")]
        words += [str(word) for key, value in settings.items() for word in (f"--{key}", value)]
        begin = time.time()
        result = subprocess.run(words, capture_output=True, text=True, check=False)
        seconds = time.time() - begin
        rates = [float(rate) for _, rate in LINE.findall(result.stdout + result.stderr)]
        if result.returncode or not rates:
            raise SystemExit(f"open_clip ended with {result.returncode}:\n{(result.stdout + result.stderr)[-3000:]}")
        return seconds, rates[1:] or rates  # the first batch waits for the loader to start

    def _score(self, name: str, split: str) -> dict[str, float]:
        """Recalls of the last checkpoint, by the same code that scores m1clip."""
        samples, out = self.source.samples(split), self.folder / f"{name}-{split}"
        out.mkdir()
        rows = [{"image": str(Path(str(p.image)).resolve()), "captions": list(p.captions)} for p in samples]
        (out / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        checkpoint = self.folder / name / "checkpoints" / "epoch_1.pt"
        words = [PEERS / "open_clip_features.py", self.folder / "configs", MODEL, checkpoint, out / "rows.jsonl", out]
        result = subprocess.run([self.python, *map(str, words)], stdout=subprocess.PIPE, text=True, check=True)
        self.version = result.stdout.split()[-1]
        image, text = (torch.from_numpy(np.load(out / f"{kind}.npy")) for kind in ("image", "text"))
        image_index = torch.tensor([index for index, sample in enumerate(samples) for _ in sample.captions])
        keys = caption_ids_of([caption for sample in samples for caption in sample.captions])
        return recalls(dict(retrieval(image, text, image_index, torch.from_numpy(keys))))


def write_rows(source: Source, path: Path, count: int, seed: int) -> None:
    """`count` training samples as open_clip reads them: full shuffled passes over all captions, the last one cut."""
    samples = [(str(Path(str(p.image)).resolve()), caption) for p in source.samples("train") for caption in p.captions]
    draw, rows = random.Random(seed), []
    while len(rows) < count:
        draw.shuffle(samples)
        rows += samples[: count - len(rows)]
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, delimiter="\t")
        table.writerow(("filepath", "title"))
        table.writerows(rows)
