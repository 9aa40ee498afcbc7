"""Studies on one GPU: models of 200M to 1B parameters, a batch of 65,536, encoding from JPEG files.

    python benchmarks/gpu_studies.py sizes DATA --json docs/results/gpu_sizes.json
    python benchmarks/gpu_studies.py batch --json docs/results/gpu_batch.json
    python benchmarks/gpu_studies.py encode DATA --json docs/results/gpu_encode.json

sizes: each model sees the same images of DATA in a process of its own, with and without activation
checkpointing: images per second, fraction of the bf16 GEMM rate, peak memory, energy of the GPU,
loss at the end. batch: one exact ViT-B-32 step of this batch in micro-batches, with the plain and
the blockwise loss. encode: ViT-B-32 with random weights. The limits are the compiled model on
tensors that are already on the GPU, and decoding without a model.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from sides import machine, set_up, spread, training_step, write

from m1clip.config import Config, DataConfig, ModelConfig, TrainConfig
from m1clip.data.images import Preprocess, map_with_timeout
from m1clip.data.loader import Batch
from m1clip.data.sources import open_source
from m1clip.hardware.device import Device
from m1clip.hardware.energy import open_meter
from m1clip.hardware.machine_info import read_machine_info, usable_cpus
from m1clip.hardware.timing import gemm_rate, timing
from m1clip.inference.model import Model
from m1clip.inference.torch_encoder import TorchEncoder
from m1clip.losses import run_loss
from m1clip.losses.registry import Ids
from m1clip.model.clip import Features, build_clip
from m1clip.model.presets import CLIPConfig, flops_per_pair, preset, with_fields
from m1clip.text.bpe import BpeTokenizer
from m1clip.training.compose import compose_step
from m1clip.training.duration import step_plan
from m1clip.training.schedule import scheduled_lr_fraction
from m1clip.training.step import make_parts

SIZES = ("200M", "500M", "1B")
WARM_UP = 3  # steps that compile and allocate
ROUNDS = 5


def config_of(options: argparse.Namespace, **train: Any) -> Config:
    """A bf16 run of a model on the GPU, one caption per image."""
    return Config(
        model=ModelConfig(
            name=options.model, grad_checkpointing=options.checkpointing, compile=options.compile
        ),
        data=DataConfig(source=(options.data or "synthetic",), captions_per_step=1),
        train=TrainConfig(device=options.device, precision="bf16", **train),
    )


def flops_of(batch: Batch, shape: CLIPConfig) -> float:
    """FLOPs per image and caption of a step; dropped patches are not computed."""
    assert batch.tokens is not None
    full, vision = flops_per_pair(shape, batch.tokens.shape[1]), shape.own_towers[0]
    if batch.kept_patches is None:
        return full
    kept_tokens = vision.tokens - vision.patches + batch.kept_patches.shape[1]
    matrices = (4 + 2 * vision.mlp_ratio) * vision.width**2 * (vision.tokens - kept_tokens)
    return full - 6 * vision.layers * (
        matrices + 2 * (vision.tokens**2 - kept_tokens**2) * vision.width
    )


def train_size(options: argparse.Namespace) -> dict[str, Any]:
    """Train one model on `--images` images, and measure."""
    batch, device = options.batch_size, Device(options.device, read_machine_info())
    steps = options.images // batch
    job = set_up(config_of(options, batch_size=batch, steps=steps))
    update, meter = training_step(job), open_meter(options.device)
    losses, joules, start = [], 0.0, 0.0
    plan = step_plan(job.config.train)
    assert plan is not None
    for number in range(steps):
        fraction = scheduled_lr_fraction(job.config.optim, plan, number)
        update.parts.update.optimizer.set_lr(fraction)
        if number == WARM_UP:
            device.synchronize()
            joules, start = (meter.joules() if meter else 0.0), time.perf_counter()
        losses.append(update.run(job.training[number], number)[0])
    device.synchronize()
    seconds, images = time.perf_counter() - start, (steps - WARM_UP) * batch
    flops = flops_of(job.training[0], job.shape)
    return {
        "parameters": sum(p.numel() for p in update.model.parameters()),
        "images": steps * batch,
        "images_per_second": images / seconds,
        "gemm_fraction": images
        / seconds
        * flops
        / gemm_rate(device, "bf16", 8192 if options.device == "cuda" else 1536),
        "peak_bytes": torch.cuda.max_memory_allocated() if options.device == "cuda" else 0,
        "joules_per_image": (meter.joules() - joules) / images if meter else None,
        "first_loss": float(losses[0]),
        "last_loss": float(torch.stack(losses[-5:]).mean()),
    }


def sizes(options: argparse.Namespace) -> dict[str, Any]:
    """Each model with and without activation checkpointing, in processes of their own."""
    result: dict[str, Any] = {}
    for name in options.models:
        for flag in ([], ["--checkpointing"]):
            command = [
                sys.executable,
                __file__,
                "size",
                options.data,
                "--model",
                name,
                *flag,
                "--device",
                options.device,
            ]
            command += [
                "--device",
                options.device,
                "--images",
                str(options.images),
                "--batch-size",
                str(options.batch_size),
            ]
            command += ["--compile"] * options.compile
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            key = f"{name}{', activation checkpointing' if flag else ''}"
            lines = done.stdout.strip().splitlines()
            result[key] = (
                json.loads(lines[-1]) if done.returncode == 0 else {"failed": done.stderr[-800:]}
            )
            print(f"{key}: {result[key]}", flush=True)
    return {"models": result, "batch": options.batch_size}


def large_batch(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds and peak memory of a step, and of the loss alone, with the plain and with the blockwise loss."""
    device, size, micro = (
        Device(options.device, read_machine_info()),
        options.batch_size,
        options.micro_batch,
    )
    shape = with_fields(preset(options.model), vocab_size=1024)
    config = config_of(
        options, batch_size=size, micro_batch=micro, steps=100, loss="infonce", text_contrast=0.0
    )
    model = build_clip(shape).to(device.torch)
    update = compose_step(
        make_parts(model, config, device, "bf16", Preprocess(image_size=shape.image_size))
    )
    ids, draw = torch.arange(size), torch.Generator().manual_seed(0)
    few = torch.randint(
        0, 256, (64, shape.image_size, shape.image_size, 3), dtype=torch.uint8, generator=draw
    )
    tokens = torch.randint(1, 1023, (size, 32), generator=draw)
    tokens[:, -1] = 1023
    identity = {"sample_ids": ids, "caption_ids": ids, "image_index": ids}
    batch = Batch(**identity, tokens=tokens, cached_images=few.to(device.torch), rows=ids % 64).to(
        device.torch
    )
    features = torch.nn.functional.normalize(
        torch.randn(2, size, shape.embed_dim, device=device.torch), dim=-1
    )

    def loss_alone() -> None:
        image, text = features
        pair = Features(image, text, model.scale(), model.logit_bias)
        ids_of_pairs = Ids(batch.sample_ids, batch.caption_ids, batch.image_index)
        update.parts.loss.loss_and_grads(pair, ids_of_pairs)

    result: dict[str, Any] = {}
    plain_limit = 1 << 62
    for name, limit in (("blockwise", run_loss.MAX_LOGITS), ("plain", plain_limit)):
        run_loss.MAX_LOGITS = limit
        for part, work in (("loss", loss_alone), ("step", lambda: update.run(batch, 0))):
            seconds = []
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            try:
                for _ in range(1 + (ROUNDS if part == "loss" else 2)):
                    device.synchronize()
                    start = time.perf_counter()
                    work()
                    device.synchronize()
                    seconds.append(time.perf_counter() - start)
            except torch.OutOfMemoryError as error:
                result[f"{part}, {name}"] = {"out_of_memory": str(error).splitlines()[0]}
            else:
                peak = torch.cuda.max_memory_allocated()
                values = {"peak_bytes": peak, "added_bytes": peak - before}
                result[f"{part}, {name}"] = {**dataclasses.asdict(timing(seconds[1:])), **values}
            update.clear()
            print(f"{part}, {name}: {result[f'{part}, {name}']}", flush=True)
    return {"batch": size, "micro_batch": micro, "model": options.model, "figures": result}


def encode(options: argparse.Namespace) -> dict[str, Any]:
    """Images per second of the encoder, and of what limits it."""
    tokenizer, device = BpeTokenizer(), Device(options.device, read_machine_info())
    config = with_fields(
        preset(options.model), vocab_size=tokenizer.vocab_size, eot_id=tokenizer.eot_id
    )
    encoder = TorchEncoder(build_clip(config), tokenizer, Preprocess(image_size=config.image_size))
    model = Model(encoder).to(options.device)
    samples = open_source(options.data).samples("train")
    paths = [str(sample.image) for sample in samples][: options.images]
    texts = [caption for sample in samples for caption in sample.captions][: 5 * options.images]
    squares = [
        pixels
        for pixels in map_with_timeout(paths, model.square, threads=usable_cpus())
        if pixels is not None
    ]
    ready = torch.randn(512, 3, config.image_size, config.image_size, device=device.torch)
    compiled = torch.compile(model.clip.encode_image, dynamic=False)
    model.clip.eval()

    def on_tensors() -> None:
        with torch.inference_mode(), torch.autocast(options.device, torch.bfloat16):
            for _ in range(16):
                compiled(ready)
        device.synchronize()

    works = {
        "compiled model, tensors on the GPU": (on_tensors, 16 * len(ready)),
        "decoding JPEG files, no model": (
            lambda: list(map_with_timeout(paths, model.square, threads=usable_cpus())),
            len(paths),
        ),
        "encode_image, JPEG files": (lambda: model.encode_image(paths), len(paths)),
        "encode_image, decoded images": (lambda: model.encode_image(squares), len(squares)),
        "encode_text, captions": (lambda: model.encode_text(texts), len(texts)),
    }
    rates: dict[str, list[float]] = {name: [] for name in works}
    for number in range(ROUNDS + 1):
        for name, (work, count) in works.items():
            start = time.perf_counter()
            work()
            if number:  # the first round warms up
                rates[name].append(count / (time.perf_counter() - start))
    return {
        "per_second": {name: dataclasses.asdict(timing(values)) for name, values in rates.items()}
    }


def rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Lines for docs/benchmarks.md."""
    lines = []
    for name, line in result.get("models", {}).items():
        if "failed" in line:
            continue
        joules = f", {line['joules_per_image']:.2f} J per image" if line["joules_per_image"] else ""
        figure = (
            f"{line['images_per_second']:,.0f} images per second, {line['gemm_fraction']:.0%} of"
            f" the GEMM rate, {line['peak_bytes'] / 1e9:.1f} GB{joules}, loss"
            f" {line['last_loss']:.2f} after {line['images']:,} images"
        )
        size = f"{name} ({line['parameters'] / 1e6:.0f}M)"
        subject = f"{size}, batch {result['batch']}, on a GPU, eager, default patch dropout"
        lines.append({"what": subject, "figure": figure, "n": 1, "command": "sizes DATA"})
    for name, line in result.get("figures", {}).items():
        if "median" in line:
            subject = (
                f"{result['model']}, batch {result['batch']:,} in micro-batches of"
                f" {result['micro_batch']:,}: {name}"
            )
            seconds = {key: line[key] for key in ("median", "low", "high", "n")}
            figure = (
                f"{spread(seconds, '.2f', ' s')}, {line['added_bytes'] / 1e9:.1f} GB above the"
                " model"
            )
            lines.append({"what": subject, "figure": figure, "n": line["n"], "command": "batch"})
    for name, line in result.get("per_second", {}).items():
        subject = f"encoding with ViT-B-32 on a GPU: {name}, per second"
        lines.append(
            {
                "what": subject,
                "figure": spread(line, ",.0f"),
                "n": line["n"],
                "command": "encode DATA",
            }
        )
    return [
        {**row, "command": f"python benchmarks/gpu_studies.py {row['command']}"} for row in lines
    ]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", choices=("sizes", "batch", "encode", "size"))
    parser.add_argument("data", nargs="?", default="")
    parser.add_argument("--model", default="ViT-B-32")
    parser.add_argument("--models", nargs="+", default=SIZES)
    parser.add_argument("--images", type=int, default=6000)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--micro-batch", type=int, default=4096)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.batch_size = options.batch_size or {"batch": 65536}.get(options.study, 128)
    study = {"sizes": sizes, "size": train_size, "batch": large_batch, "encode": encode}[
        options.study
    ]
    result = study(options)
    if options.study == "size":
        print(json.dumps(result))
        return
    result |= {"machine": machine(), "rows": rows(result)}
    for row in result["rows"]:
        print(f"{row['what']:75} {row['figure']}")
    if options.json:
        write(options.json, result)


if __name__ == "__main__":
    main()
