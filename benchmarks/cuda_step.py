"""Milliseconds of a training step on a GPU: m1clip and open_clip, eager, compiled, and as a CUDA graph.

    python benchmarks/cuda_step.py --json cuda.json                       # all three models, under six minutes
    python benchmarks/cuda_step.py --models ViT-B-16 --seconds 300        # one of them, with more time for compiling
    python benchmarks/cuda_step.py --models ViT-B-32 --variants "m1clip blocks"   # one way of it
    python benchmarks/cuda_step.py --packages DIR                         # open_clip lies in DIR
    python benchmarks/cuda_step.py --device cpu --quick                   # does it run

Each model has a process and a time of its own; what does not fit into the time is named and left out. A step is
forward, loss, backward, clipping (ours), fused AdamW; inputs lie ready on the device as normalised floats, for both.
Share is the usual count of a model's work (`flops_per_pair`) a second, over the measured rate of a large bf16 product;
m1clip skips what the last block computes in vain, which the count does not. "plain" is without our own kernels.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from cuda_sides import Setting, open_clip_step, our_step

from m1clip.hardware.device import Device
from m1clip.hardware.facts import read_facts
from m1clip.hardware.measure import gemm_rate
from m1clip.hardware.timing import timing
from m1clip.io import write_json
from m1clip.model.presets import PRESETS, CLIPConfig, flops_per_pair, with_fields

BATCHES = {"tiny": (256,), "ViT-B-16": (512,), "ViT-B-32": (1024,)}
SHORT = 32  # tokens after trimming: most captions are shorter
# (side, what): in the order of their worth, since the time may end before the list.
VARIANTS = (
    ("open_clip", "compiled"), ("m1clip", "compiled"), ("m1clip", "compiled plain"), ("m1clip", "blocks"),
    ("open_clip", "eager"), ("m1clip", "eager"), ("m1clip", "blocks muon"), ("m1clip", "compiled autotune"),
    ("open_clip", "compiled pure_bf16"),
)  # fmt: skip
TINY = (
    ("m1clip", "blocks graph"), ("open_clip", "eager"), ("m1clip", "eager"), ("m1clip", "blocks graph muon"),
    ("open_clip", "compiled"), ("m1clip", "compiled graph"), ("m1clip", "compiled"),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is measured of a model."""

    shape: CLIPConfig
    batches: tuple[int, ...]
    variants: tuple[tuple[str, str], ...]


def plan_of(model: str, quick: bool) -> Plan:
    """The shape, batches and variants of a model; a smoke run takes two blocks of it."""
    shape, variants = PRESETS[model], TINY if model == "tiny" else VARIANTS
    if model == "tiny":
        # The tiny model of issue 4: patches, class token and norm as in open_clip, so that the two do equal work.
        shape = dataclasses.replace(
            shape, vision_layers=6, text_layers=4, context_length=77, pooling="cls", positions="learned", stem="patch"
        )
    if quick:
        small = {"image_size": 2 * shape.patch_size, "vocab_size": 64, "embed_dim": 32}
        for tower in ("vision", "text"):
            small |= {f"{tower}_width": 64, f"{tower}_layers": 2, f"{tower}_heads": 2}
        return Plan(with_fields(shape, **small), (4,), variants)  # type: ignore[arg-type]
    return Plan(shape, BATCHES[model], variants)


def seconds_of(step: Callable[[], object], device: Device, budget: float) -> list[float]:
    """Seconds of each step; on CUDA by events, so that the host never waits in between."""
    if device.kind != "cuda":
        found = []
        for _ in range(2):
            begin = time.perf_counter()
            step()
            found.append(time.perf_counter() - begin)
        return found
    device.synchronize()
    begin = time.perf_counter()
    step()
    device.synchronize()
    count = int(min(60, max(8, budget / (time.perf_counter() - begin))))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    device.synchronize()
    return [one.elapsed_time(two) / 1e3 for one, two in itertools.pairwise(marks)]


def measure(setting: Setting, side: str, variant: str, rate: float, device: Device) -> dict[str, Any]:
    """One line of the table."""
    if device.kind == "cuda":
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    step = our_step(setting, variant) if side == "m1clip" else open_clip_step(setting, variant)
    for _ in range(5):  # compiles, and for a graph: three real steps, the capture, a replay
        step()
    device.synchronize()
    ready = time.perf_counter() - begin
    taken = timing(seconds_of(step, device, budget=2.0))
    loss = float(step())
    flops = flops_per_pair(setting.shape, setting.tokens) * setting.batch
    return {
        "side": side, "variant": variant, "batch": setting.batch, "tokens": setting.tokens, "ready_seconds": ready,
        "seconds": dataclasses.asdict(taken), "images_per_second": setting.batch / taken.median,
        "share": flops / taken.median / rate, "peak_bytes": device.peak_bytes(), "loss": loss,
    }  # fmt: skip


def lines_of(model: str, kind: str, quick: bool, seconds: float, only: list[str]) -> Iterator[dict[str, Any]]:
    """All lines of a model, until its time is over."""
    begin = time.perf_counter()
    device = Device("cuda" if kind == "cuda" else "cpu", read_facts())
    rate = gemm_rate(device, "bf16", size=8192 if kind == "cuda" else 512)
    yield {"gemm_rate": rate}
    plan = plan_of(model, quick)
    # Equal length first; then the trimmed text, which open_clip does not do, for the best of ours and for open_clip.
    chosen = [v for v in plan.variants if not only or " ".join(v) in only]
    jobs = [(b, 77, v) for v in chosen for b in plan.batches]
    jobs += [(b, SHORT, v) for v in chosen[:3] for b in plan.batches[-1:]]
    backend = "eager" if quick and kind == "cpu" else "inductor"
    dead: set[tuple[str, str]] = set()
    for batch, tokens, (side, variant) in jobs:
        name = {"side": side, "variant": variant, "batch": batch, "tokens": tokens}
        if time.perf_counter() - begin > seconds:
            yield {**name, "skipped": "no time left"}
            continue
        if (side, variant) in dead:
            continue
        try:
            yield measure(Setting(plan.shape, batch, tokens, device, backend), side, variant, rate, device)
        except Exception as error:  # noqa: BLE001  the next line must still be measured: device time is short
            dead.add((side, variant))
            yield {**name, "skipped": f"{type(error).__name__}: {str(error).strip().splitlines()[-1:]}"}
        gc.collect()
        torch.compiler.reset()
        if kind == "cuda":
            torch.cuda.empty_cache()


def run_model(model: str, options: argparse.Namespace, lines: list[dict[str, Any]], keep: Callable[[], None]) -> None:
    """Add the lines of a model from a process of its own, which is ended when it does not keep its time."""
    command = [sys.executable, __file__, "--worker", model, "--device", options.device]
    command += ["--seconds", str(options.seconds), *(["--quick"] if options.quick else [])]
    command += ["--packages", options.packages] if options.packages else []
    command += ["--variants", *options.variants] if options.variants else []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + options.seconds + 60
        assert process.stdout is not None
        for text in process.stdout:
            if text.startswith("{"):
                lines.append(json.loads(text))
                show(model, lines[-1])
                keep()
            if time.monotonic() > deadline:
                process.kill()
    if process.returncode:
        lines.append({"skipped": f"the process ended with {process.returncode}"})
        show(model, lines[-1])


def show(model: str, line: dict[str, Any]) -> None:
    """One line of the table."""
    if "gemm_rate" in line:
        print(f"{model}: bf16 GEMM {line['gemm_rate'] / 1e12:.1f} TFLOP/s", flush=True)
        return
    name = f"  {line.get('side', '')} {line.get('variant', '')}"
    place = f"batch {line.get('batch', 0):5} tokens {line.get('tokens', 0):3}"
    if "skipped" in line:
        print(f"{name:34} {place}  {line['skipped']}", flush=True)
        return
    t = line["seconds"]
    print(f"{name:34} {place} {t['median'] * 1e3:8.2f} ms [{t['low'] * 1e3:.2f}, {t['high'] * 1e3:.2f}] n={t['n']:<3}"
          f"{line['images_per_second']:9.0f} samples/s {line['share']:5.1%} {line['peak_bytes'] / 1e9:6.1f} GB "
          f"ready {line['ready_seconds']:.0f} s loss {line['loss']:.3f}", flush=True)  # fmt: skip


def ratios(lines: list[dict[str, Any]]) -> list[str]:
    """Our best step against open_clip's eager and best compiled step, for each batch and length."""
    found = []
    done = [line for line in lines if "seconds" in line]
    for batch, tokens in sorted({(line["batch"], line["tokens"]) for line in done}):
        here = [line for line in done if (line["batch"], line["tokens"]) == (batch, tokens)]
        # The same optimizer on both sides; ours with Muon stands for itself.
        ours = [x for x in here if x["side"] == "m1clip" and "muon" not in x["variant"]]
        for kind in ("eager", "compiled"):
            theirs = [x for x in here if x["side"] == "open_clip" and x["variant"].startswith(kind)]
            if ours and theirs:
                best, other = (min(side, key=lambda x: x["seconds"]["median"]) for side in (ours, theirs))
                ratio = other["seconds"]["median"] / best["seconds"]["median"]
                found.append(f"batch {batch}, {tokens} tokens: m1clip {best['variant']} is {ratio:.2f} times as "
                             f"fast as open_clip {other['variant']}")  # fmt: skip
    return found


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["ViT-B-16", "tiny", "ViT-B-32"])
    parser.add_argument("--variants", nargs="+", default=[], help="side and words, as printed; default: all")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--seconds", type=float, default=100, help="for each model")
    parser.add_argument("--quick", action="store_true", help="two small blocks: does it run")
    parser.add_argument("--packages", help="a folder with open_clip and what it needs")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.packages:
        sys.path.append(options.packages)
    if options.worker:
        for line in lines_of(options.worker, options.device, options.quick, options.seconds, options.variants):
            print(json.dumps(line), flush=True)
        return
    facts = read_facts()
    result: dict[str, Any] = {"command": sys.argv, "facts": dataclasses.asdict(facts), "models": {}}

    def keep() -> None:
        """Write what there is: the time on a borrowed card may end at any line."""
        for found in result["models"].values():
            found["ratios"] = ratios(found["lines"])
        if options.json:
            write_json(options.json, result)

    for model in options.models:
        lines: list[dict[str, Any]] = []
        result["models"][model] = {"lines": lines, "ratios": []}
        run_model(model, options, lines, keep)
        keep()
        print(*(f"  {line}" for line in ratios(lines)), sep="\n")


if __name__ == "__main__":
    main()
