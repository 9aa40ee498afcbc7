"""Recall of open_clip with Muon after more and more minutes of two cores, tuned at each (docs/recipe.md).

    PYTHONPATH=open_clip/src peers/bin/python benchmarks/peers/open_clip_budget.py flickr8k.jsonl \
        --json docs/results/open_clip_budget.json --seconds 120 --processes 8

open_clip's model, loss and optimizer with the settings of its entry in the speedrun
(open_clip_entry.py), as many samples as that entry reads in the time on two cores, and trials of
learning rate, batch size and crops at each budget on the validation split. Images are cropped on
the GPU as by its transform, with bilinear instead of bicubic resampling, because its loader would
need an hour. The table has one JSON row per image: image, captions and split (train or val).
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import queue
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from open_clip_entry import MODEL, SHAPE
from PIL import Image
from torch import Tensor

SIZE, CONTEXT = 112, 32
SAMPLES_PER_MINUTE = 4096  # 42,368 and 38,144 in ten minutes (docs/speedrun.md)
MINUTES = (30, 10, 5, 2, 60)  # in this order: the longest may not fit
TRIALS = (
    {"lr": 1.5e-3, "batch": 128, "crop_min": 0.5},
    {"lr": 2.5e-3, "batch": 128, "crop_min": 0.5},
    {"lr": 1e-3, "batch": 64, "crop_min": 0.5},
    {"lr": 1.5e-3, "batch": 128, "crop_min": 0.3},
)
MORE_SEEDS = (1, 2)  # of the best trial
WEIGHT_DECAY, FALLBACK_LR_SCALE, GRAD_CLIP_NORM = 0.1, 0.5, 1.0  # of the entry
WARMUP = 0.1  # of the steps, as in the entry
RATIO = math.log(4 / 3)  # of width to height of a crop, at most
ATTEMPTS = 10  # to draw a crop inside of the image, as torchvision does


def read(path: Path, out: Path) -> None:
    """Decode and tokenize the table once, for all processes."""
    import torchvision_ops  # noqa: F401  first: open_clip imports torchvision

    # isort: split
    import open_clip

    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    tokenizer = open_clip.get_tokenizer("ViT-B-32", context_length=CONTEXT)
    data = {}
    for split in ("train", "val"):
        own = [row for row in rows if row["split"] == split]
        with ThreadPoolExecutor() as pool:
            images = list(pool.map(decode, [row["image"] for row in own]))
        heights, widths = zip(*(image.shape[:2] for image in images), strict=True)
        pixels = np.zeros((len(own), max(heights), max(widths), 3), np.uint8)
        for number, image in enumerate(images):
            pixels[number, : image.shape[0], : image.shape[1]] = image
        data[split] = {
            "pixels": torch.from_numpy(pixels),
            "sizes": torch.tensor([heights, widths]).T,
            "tokens": tokenizer([text for row in own for text in row["captions"]]),
            "image_index": torch.tensor(
                [number for number, row in enumerate(own) for _ in row["captions"]]
            ),
        }
    torch.save(data, out)


def decode(path: str) -> np.ndarray:
    """Pixels with a short side of the model's image size."""
    with Image.open(path) as image:
        scale = SIZE / min(image.size)
        size = tuple(max(SIZE, round(scale * side)) for side in image.size)
        return np.asarray(image.convert("RGB").resize(size, Image.Resampling.BICUBIC))


def crop_boxes(sizes: Tensor, crop_min: float) -> Tensor:
    """(n, 2) heights and widths -> (n, 4) top, left, height, width: torchvision's RandomResizedCrop."""
    count, device = len(sizes), sizes.device
    height, width = sizes.float().T[:, :, None]  # (n, 1) each
    area = crop_min + (1 - crop_min) * torch.rand(count, ATTEMPTS, device=device)
    ratio = ((2 * torch.rand(count, ATTEMPTS, device=device) - 1) * RATIO).exp()
    wide = (area * height * width * ratio).sqrt().round()
    high = (area * height * width / ratio).sqrt().round()
    first = ((wide <= width) & (high <= height)).float().argmax(dim=1, keepdim=True)
    wide = wide.gather(1, first).minimum(width)
    high = high.gather(1, first).minimum(height)
    top, left = (
        (torch.rand(count, 1, device=device) * (side - cut + 1)).floor()
        for side, cut in ((height, high), (width, wide))
    )
    return torch.cat([top, left, high, wide], dim=1)


def crop(pixels: Tensor, boxes: Tensor) -> Tensor:
    """(n, height, width, 3) uint8 -> (n, 3, SIZE, SIZE) from 0 to 1."""
    whole = torch.tensor(pixels.shape[1:3], device=pixels.device)
    line = (torch.arange(SIZE, device=pixels.device) + 0.5) / SIZE
    y = (boxes[:, :1] + boxes[:, 2:3] * line) / whole[0] * 2 - 1  # (n, SIZE)
    x = (boxes[:, 1:2] + boxes[:, 3:] * line) / whole[1] * 2 - 1
    grid = torch.stack([x[:, None].expand(-1, SIZE, -1), y[:, :, None].expand(-1, -1, SIZE)], dim=3)
    images = pixels.permute(0, 3, 1, 2).float() / 255
    return F.grid_sample(images, grid, align_corners=False, padding_mode="border")


class Run:
    """One training run, and its validation recall."""

    def __init__(self, job: dict[str, Any], data: dict[str, Any], device: torch.device) -> None:
        import open_clip
        from open_clip_train.optim import OptimizerCfg, create_optimizer

        torch.manual_seed(job["seed"])
        self.job, self.data, self.device = job, data, device
        self.model = open_clip.create_model(MODEL, device=device)
        self.loss = open_clip.ClipLoss()
        config = OptimizerCfg(
            opt="timm/muon",
            lr=job["lr"],
            weight_decay=WEIGHT_DECAY,
            beta1=0.9,
            beta2=0.98,
            eps=1e-6,
            opt_kwargs={"fallback_lr_scale": FALLBACK_LR_SCALE},
        )
        self.optimizer = create_optimizer(self.model, config)
        mean, std = open_clip.OPENAI_DATASET_MEAN, open_clip.OPENAI_DATASET_STD
        self.mean, self.std = (
            torch.tensor(values, device=device).view(1, 3, 1, 1) for values in (mean, std)
        )

    def train(self) -> float:
        """Mean of both recall@10 on the validation split, in percent."""
        from open_clip_train.scheduler import cosine_lr

        job, own = self.job, self.data["train"]
        steps = job["samples"] // job["batch"]
        schedule = cosine_lr(self.optimizer, job["lr"], max(1, int(WARMUP * steps)), steps)
        generator = torch.Generator().manual_seed(job["seed"])
        passes = math.ceil(job["samples"] / len(own["tokens"]))
        order = [torch.randperm(len(own["tokens"]), generator=generator) for _ in range(passes)]
        pairs = torch.cat(order)[: steps * job["batch"]].view(steps, -1).to(self.device)
        self.model.train()
        for step, chosen in enumerate(pairs):
            schedule(step)
            rows = own["image_index"][chosen]
            images = crop(own["pixels"][rows], crop_boxes(own["sizes"][rows], job["crop_min"]))
            self.optimizer.zero_grad()
            with torch.autocast(self.device.type, torch.bfloat16):
                features = self.model((images - self.mean) / self.std, own["tokens"][chosen])
                loss = self.loss(*features[:3])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), GRAD_CLIP_NORM)
            self.optimizer.step()
            with torch.no_grad():
                self.model.logit_scale.clamp_(0, math.log(100))
        return self.score()

    @torch.no_grad()
    def score(self) -> float:
        """Mean of both recall@10 of complete images, cropped at the center."""
        own = self.data["val"]
        self.model.eval()
        side = torch.full_like(own["sizes"][:, :1], SIZE)
        middle = torch.div(own["sizes"] - SIZE, 2, rounding_mode="floor")
        boxes = torch.cat([middle, side, side], dim=1).float()
        with torch.autocast(self.device.type, torch.bfloat16):
            image = torch.cat(
                [
                    self.model.encode_image((crop(pixels, box) - self.mean) / self.std)
                    for pixels, box in zip(own["pixels"].split(250), boxes.split(250), strict=True)
                ]
            )
            text = torch.cat([self.model.encode_text(part) for part in own["tokens"].split(1000)])
        image, text = (F.normalize(side.float(), dim=1) for side in (image, text))
        return recall_at_10(text @ image.T, own["image_index"])


def recall_at_10(scores: Tensor, image_index: Tensor) -> float:
    """(captions, images) similarities -> the mean of both directions in percent."""
    own = scores.gather(1, image_index[:, None])
    by_text = ((scores > own).sum(dim=1) < 10).float().mean()
    is_own = image_index[:, None] == torch.arange(scores.shape[1], device=scores.device)
    best = scores.masked_fill(~is_own, -2).amax(dim=0)
    by_image = ((scores > best).sum(dim=0) < 10).float().mean()
    return round(50 * float(by_text + by_image), 2)


def worker(jobs: Any, results: Any, path: str, device_name: str) -> None:
    """Run jobs until there are no more."""
    import torchvision_ops  # noqa: F401  first: open_clip imports torchvision

    # isort: split
    import open_clip

    torch.set_num_threads(1)
    device = torch.device(device_name)
    open_clip.add_model_config(str(Path(path).parent))
    loaded = torch.load(path, weights_only=True, mmap=True)
    data = {
        split: {name: tensor.to(device) for name, tensor in part.items()}
        for split, part in loaded.items()
    }
    while (job := jobs.get()) is not None:
        begin = time.time()
        try:
            result = {**job, "validation": Run(job, data, device).train()}
        except Exception as error:  # noqa: BLE001  one job must not end the others
            result = {**job, "error": f"{type(error).__name__}: {error}"[:300]}
        results.put({**result, "seconds": round(time.time() - begin, 1)})


def more_seeds(runs: list[dict[str, Any]], minutes: int) -> list[dict[str, Any]]:
    """Jobs that repeat the best trial of a budget."""
    own = [run for run in runs if run["minutes"] == minutes and "validation" in run]
    if not own:
        return []
    best = max(own, key=lambda run: run["validation"])
    again = {name: best[name] for name in ("minutes", "samples", *TRIALS[0])}
    return [{**again, "seed": seed} for seed in MORE_SEEDS]


def write_runs(path: Path, runs: list[dict[str, Any]]) -> None:
    """Write what is known so far, with the machine and the versions."""
    import open_clip
    import timm

    facts = {
        "cpu cores": os.cpu_count(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "open_clip": open_clip.__version__,
        "timm": timm.__version__,
    }
    path.write_text(json.dumps({"machine": facts, "runs": runs}, indent=1) + "\n", "utf-8")


def main() -> None:
    """Run all trials, then more seeds of the best of each budget, until the time is up."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, default=Path("/tmp/open-clip-budget"))
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--samples-per-minute", type=int, default=SAMPLES_PER_MINUTE)
    options = parser.parse_args()
    deadline = time.time() + options.seconds
    options.scratch.mkdir(parents=True, exist_ok=True)
    (options.scratch / f"{MODEL}.json").write_text(json.dumps(SHAPE), encoding="utf-8")
    packed = options.scratch / "data.pt"
    read(options.data, packed)
    print(f"decoded, {deadline - time.time():.0f} s are left", flush=True)
    context = multiprocessing.get_context("spawn")
    jobs, results = context.Queue(), context.Queue()
    arguments = (jobs, results, str(packed), options.device)
    processes = [context.Process(target=worker, args=arguments) for _ in range(options.processes)]
    for process in processes:
        process.start()
    waiting = [
        {"minutes": minutes, "samples": minutes * options.samples_per_minute, **trial, "seed": 0}
        for minutes in MINUTES
        for trial in TRIALS
    ]
    trials = dict.fromkeys(MINUTES, len(TRIALS))  # that have not ended
    runs: list[dict[str, Any]] = []
    running = 0
    while (waiting or running) and time.time() < deadline:
        while waiting and running < options.processes:
            jobs.put(waiting.pop(0))
            running += 1
        try:
            run = results.get(timeout=1)
        except queue.Empty:
            continue
        running -= 1
        runs.append(run)
        print(f"{deadline - time.time():4.0f} s left  {run}", flush=True)
        write_runs(options.json, runs)
        trials[run["minutes"]] -= 1
        if trials[run["minutes"]] == 0:
            waiting[:0] = more_seeds(runs, run["minutes"])
    for process in processes:
        process.terminate()
    for minutes in sorted(MINUTES):
        values = [r["validation"] for r in runs if r["minutes"] == minutes and "validation" in r]
        if values:
            print(f"{minutes} minutes: best {max(values):.1f}, mean {statistics.fmean(values):.1f}")


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    main()
