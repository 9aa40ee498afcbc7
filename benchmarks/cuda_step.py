"""Milliseconds of a training step on a GPU: m1clip and open_clip, eager, compiled, and as a CUDA graph.

    python benchmarks/cuda_step.py --json cuda.json                       # all three models, up to half an hour
    python benchmarks/cuda_step.py --models ViT-B-16 --variants "m1clip compiled" "open_clip compiled"
    python benchmarks/cuda_step.py --packages DIR                         # open_clip is in DIR
    python benchmarks/cuda_step.py --device cpu --quick                   # smoke test

Each model has its own process and time limit; what does not fit is listed as skipped. A step is
forward, loss, backward, clipping (ours), AdamW (fused, except in open_clip's compiled step); inputs
are normalized floats on the device, for both sides. The GEMM fraction is the usual operation count
(`flops_per_pair`) per second over the measured rate of a large bf16 product; m1clip skips work in
the last block that the count includes. "plain" is without our own kernels.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sides import peer_shape
from torch import Tensor, nn

from m1clip.config import OptimConfig
from m1clip.hardware.device import Device
from m1clip.hardware.machine_info import read_machine_info
from m1clip.hardware.timing import gemm_rate, timing
from m1clip.io import write_json
from m1clip.losses.registry import LOSSES, Ids
from m1clip.losses.run_loss import RunLoss
from m1clip.model.clip import build_clip
from m1clip.model.presets import PRESETS, CLIPConfig, flops_per_pair, with_fields
from m1clip.training.optim import Optimizer
from m1clip.training.torch_optimizers import BuildOptions

BATCH_SIZES = {"tiny": 256, "ViT-B-16": 512, "ViT-B-32": 1024}
INPUTS = 3  # different batches, taken in turn
EAGER_STEPS = 3  # before a CUDA graph is captured: they create optimizer state and compile
# In the order of their worth, since the time may end before the list.
VARIANTS = {
    "large": (
        "m1clip compiled",
        "open_clip compiled",
        "m1clip compiled plain",
        "m1clip eager",
        "open_clip eager",
    ),
    "tiny": ("m1clip compiled graph", "open_clip compiled", "m1clip eager", "open_clip eager"),
}
Step = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Job:
    """What both sides get."""

    shape: CLIPConfig
    batch_size: int
    tokens: int
    device: Device
    backend: str = "inductor"  # of torch.compile; "eager" only traces, for a smoke test

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """torch.compile for one shape."""
        return torch.compile(function, dynamic=False, backend=self.backend)

    def inputs(self) -> list[tuple[Tensor, Tensor]]:
        """Images and captions on the device.

        The EOT token is the largest id, as open_clip expects.
        """
        draw = torch.Generator().manual_seed(0)
        size, end = self.shape.image_size, self.shape.vocab_size - 1
        made = []
        for _ in range(INPUTS):
            pixels = torch.randn(self.batch_size, 3, size, size, generator=draw)
            tokens = torch.randint(1, end, (self.batch_size, self.tokens), generator=draw)
            tokens[:, -1] = end
            made.append((pixels.to(self.device.torch), tokens.to(self.device.torch)))
        return made


def our_step(job: Job, words: list[str]) -> Step:
    """m1clip's model, loss and optimizer; words: eager, compiled, plain, graph."""
    device = job.device
    torch.manual_seed(0)
    model = build_clip(with_fields(job.shape, eot_id=job.shape.vocab_size - 1)).to(device.torch)
    model.set_attention("sdpa")
    if "compiled" in words and "plain" not in words and device.kind == "cuda":
        model.use_triton()  # as `m1clip train --compile` does
    model.train()
    graph = "graph" in words and device.kind == "cuda"
    config = OptimConfig(optimizer="adamw", lr=1e-4)
    optimizer = Optimizer(model, config, BuildOptions(fused=True, capturable=graph))
    forward = job.compile(model) if "compiled" in words else model
    parameters = list(model.parameters())
    objective = RunLoss(LOSSES["infonce"])
    order = torch.arange(job.batch_size, device=device.torch)
    ids = Ids(order, order, order)

    def step(pixels: Tensor, tokens: Tensor) -> Tensor:
        with torch.autocast(device.kind, torch.bfloat16):
            features = forward(pixels, tokens)
        loss = objective.value(features, ids)
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        torch.nn.utils.clip_grads_with_norm_(parameters, 1.0, norm)
        optimizer.step()
        optimizer.zero_grad()
        model.clamp_scale()
        return loss.detach()

    optimizer.set_lr(0.5)
    return captured(step, model) if graph else step


def captured(step: Step, model: nn.Module) -> Step:
    """Three eager steps on another stream, then the step as a CUDA graph."""
    stream, calls = torch.cuda.Stream(), 0
    graph, inputs, loss = torch.cuda.CUDAGraph(), [], torch.empty(0)

    def run(*batch: Tensor) -> Tensor:
        nonlocal calls, inputs, loss
        calls += 1
        if calls <= EAGER_STEPS:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                step_loss = step(*batch)
            torch.cuda.current_stream().wait_stream(stream)
            return step_loss
        if not inputs:
            inputs = [tensor.clone() for tensor in batch]
            for p in model.parameters():
                p.grad = None  # the graph has its own gradients
            with torch.cuda.graph(graph):
                loss = step(*inputs)
        torch._foreach_copy_(inputs, list(batch))
        graph.replay()
        return loss.clone()

    return run


def open_clip_step(job: Job, words: list[str]) -> Step:
    """open_clip (4.2) as its trainer runs it with --precision amp_bf16, but AdamW is fused where it is not compiled.

    Compiled is --torchcompile-strategy step: forward, loss, backward and optimizer in one compiled
    function, with the learning rate as a tensor.
    """
    sys.path.append(str(Path(__file__).parent / "peers"))
    try:
        import torchvision_ops  # noqa: F401  first: open_clip imports torchvision
    except SystemExit as error:  # no torchvision
        raise ImportError(str(error)) from None
    from open_clip.model import CLIP as OpenCLIP
    from open_clip.task import CLIPTask

    s = peer_shape(job.shape)
    vision = {
        "layers": s["vision_layers"],
        "width": s["vision_width"],
        "no_ln_pre": not s["vision_pre_norm"],
    }
    vision |= {"head_width": s["vision_width"] // s["vision_heads"]}
    vision |= {key: s[key] for key in ("patch_size", "image_size", "mlp_ratio")}
    text = {"layers": s["text_layers"], "width": s["text_width"], "heads": s["text_heads"]}
    text |= {
        "context_length": job.tokens,
        "vocab_size": s["vocab_size"],
        "mlp_ratio": s["mlp_ratio"],
    }
    torch.manual_seed(0)
    device = job.device.torch
    model = OpenCLIP(s["embed_dim"], vision, text, output_dict=True).to(device)
    task = CLIPTask(model, device=device, verbose=False).train()
    compiled = "compiled" in words
    lr = torch.tensor(1e-4, device=device) if compiled else 1e-4
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=lr, weight_decay=0.2, fused=None if compiled else True
    )

    def update(batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast(job.device.kind, torch.bfloat16):
            losses, _ = task(batch)
        loss: Tensor = losses["loss"]
        loss.backward()
        optimizer.step()
        return loss.detach()

    if compiled:
        update = job.compile(update)

    def step(pixels: Tensor, tokens: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = update({"image": pixels, "text": tokens})
        task.clamp_logit_scale()
        return loss

    return step


def model_shape(model: str, quick: bool) -> CLIPConfig:
    """The shape of a model; a smoke test takes two small blocks of it."""
    shape = PRESETS[model]
    # Patches, class token and norm as in open_clip, so that both do the same work.
    if model == "tiny":
        same = {
            "vision_layers": 6,
            "text_layers": 4,
            "context_length": 77,
            "pooling": "cls",
            "text_pooling": "eot",
        }
        shape = with_fields(shape, **same, positions="learned", stem="patch")  # type: ignore[arg-type]
    if quick:
        small: dict[str, Any] = {
            "image_size": 2 * shape.own_towers[0].patch_size,
            "vocab_size": 64,
            "embed_dim": 32,
        }
        for tower in ("vision", "text"):
            small |= {f"{tower}_width": 64, f"{tower}_layers": 2, f"{tower}_heads": 2}
        shape = with_fields(shape, **small)
    return shape


def step_seconds(step: Callable[[], object], device: Device) -> list[float]:
    """Seconds of each step; on CUDA by events, so that the host never waits in between."""
    begin = time.perf_counter()
    step()
    device.synchronize()
    seconds = time.perf_counter() - begin
    if device.kind != "cuda":
        return [seconds]
    marks = [
        torch.cuda.Event(enable_timing=True) for _ in range(int(min(60, max(8, 2.0 / seconds))) + 1)
    ]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    device.synchronize()
    return [first.elapsed_time(second) / 1e3 for first, second in itertools.pairwise(marks)]


def measure(job: Job, variant: str, rate: float) -> dict[str, Any]:
    """One line of the table."""
    device, (side, *words) = job.device, variant.split()
    device.reset_peak()
    begin = time.perf_counter()
    make = our_step if side == "m1clip" else open_clip_step
    step, inputs = make(job, words), itertools.cycle(job.inputs())
    for _ in range(EAGER_STEPS + 2):  # compiles; captures a graph and replays it once
        step(*next(inputs))
    device.synchronize()
    ready = time.perf_counter() - begin
    measured = timing(step_seconds(lambda: step(*next(inputs)), device))
    flops = flops_per_pair(job.shape, job.tokens) * job.batch_size
    return {
        "side": side,
        "variant": " ".join(words),
        "batch": job.batch_size,
        "tokens": job.tokens,
        "ready_seconds": ready,
        "seconds": dataclasses.asdict(measured),
        "images_per_second": job.batch_size / measured.median,
        "gemm_fraction": flops / measured.median / rate,
        "peak_bytes": device.peak_bytes(),
        "loss": float(step(*next(inputs))),
    }


def lines_of(model: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All lines of a model, until its time is over."""
    begin, kind = time.perf_counter(), options.device
    device = Device(kind, read_machine_info())
    rate = gemm_rate(device, "bf16", size=8192 if kind == "cuda" else 512)
    yield {"gemm_rate": rate}
    backend = "eager" if options.quick and kind == "cpu" else "inductor"
    batch_size = 4 if options.quick else BATCH_SIZES[model]
    job = Job(model_shape(model, options.quick), batch_size, 77, device, backend)
    for variant in options.variants or VARIANTS["tiny" if model == "tiny" else "large"]:
        try:
            if time.perf_counter() - begin > options.seconds:
                raise TimeoutError("no time left")
            yield measure(job, variant, rate)
        except Exception as error:  # noqa: BLE001  the next line must still be measured: device time is short
            side, _, words = variant.partition(" ")
            line = next(iter(str(error).strip().splitlines()), "")
            yield {"side": side, "variant": words, "skipped": f"{type(error).__name__}: {line}"}
        gc.collect()
        torch.compiler.reset()
        if kind == "cuda":
            torch.cuda.empty_cache()


def run_model(
    model: str, options: argparse.Namespace, lines: list[dict[str, Any]], keep: Callable[[], None]
) -> None:
    """Add the lines of a model from its own process, which is killed when it exceeds its time."""
    command = [sys.executable, __file__, "--worker", model, *sys.argv[1:]]
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
    if "skipped" in line:
        print(f"{name:34} skipped: {line['skipped']}", flush=True)
        return
    t = line["seconds"]
    times = (
        f"{t['median'] * 1e3:8.2f} ms [{t['low'] * 1e3:.2f}, {t['high'] * 1e3:.2f}] n={t['n']:<3}"
    )
    rest = f"{line['images_per_second']:9,.0f} images/s {line['gemm_fraction']:5.0%} of GEMM"
    peak = (
        f"{line['peak_bytes'] / 1e9:6.1f} GB, ready after {line['ready_seconds']:.0f} s, loss"
        f" {line['loss']:.3f}"
    )
    print(f"{name:34} batch {line['batch']:5} {times} {rest} {peak}", flush=True)


def ratios(lines: list[dict[str, Any]]) -> list[str]:
    """Our fastest step against open_clip's eager and compiled step."""
    done = [line for line in lines if "seconds" in line]
    ratio_lines = []
    for kind in ("eager", "compiled"):
        ours = [line for line in done if line["side"] == "m1clip"]
        theirs = [line for line in done if line["side"] == "open_clip" and line["variant"] == kind]
        if ours and theirs:
            best = min(ours, key=lambda line: line["seconds"]["median"])
            ratio = theirs[0]["seconds"]["median"] / best["seconds"]["median"]
            where = f"batch {best['batch']}, {best['tokens']} tokens"
            ratio_lines.append(
                f"{where}: m1clip {best['variant']} is {ratio:.2f} times as fast as open_clip"
                f" {kind}"
            )
    return ratio_lines


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["ViT-B-16", "tiny", "ViT-B-32"])
    parser.add_argument(
        "--variants", nargs="+", default=[], help="side and words, as printed; default: all"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--seconds",
        type=float,
        default=500,
        help="for each model; compiling open_clip's step can take four minutes",
    )
    parser.add_argument("--quick", action="store_true", help="two small blocks: a smoke test")
    parser.add_argument("--packages", help="a folder with open_clip and what it needs")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.packages:
        sys.path.append(options.packages)
    if options.worker:
        for line in lines_of(options.worker, options):
            print(json.dumps(line), flush=True)
        return
    result: dict[str, Any] = {
        "command": sys.argv,
        "facts": dataclasses.asdict(read_machine_info()),
        "models": {},
    }

    def keep() -> None:
        """Write what there is: the time on a borrowed card may end at any line."""
        for model_lines in result["models"].values():
            model_lines["ratios"] = ratios(model_lines["lines"])
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
