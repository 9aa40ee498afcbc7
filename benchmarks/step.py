"""Seconds of one training step of the prior art's job: the naive baseline and m1clip, in turn, in one run.

Each side lives in its own process (m1clip changes how its process keeps memory, which must not help the other) and
waits while the other works, so that a busy moment of the machine falls on both alike.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sides import Side, machine, peak_memory, spread, step_flops, write

from m1clip.config import Config, from_dict, load_config, read_preset, to_toml
from m1clip.hardware.timing import timing

GOAL_RATIO, GOAL_BYTES = 2.9, 2.0e9
LINES = {"naive": "naive baseline, fp32", "m1clip": "m1clip", "full": "m1clip without text trimming"}


def answers_of(side: str, config: Config) -> dict[str, Callable[[], Any]]:
    """What the process of a side can be asked."""
    import torch

    def timed(step: Callable[[], object]) -> dict[str, float]:
        begin, used = time.perf_counter(), time.process_time()
        step()
        return {"seconds": time.perf_counter() - begin, "cpu_seconds": time.process_time() - used}

    if side == "naive":
        from naive import NaiveTrainer, prior_art_job

        trainer = NaiveTrainer(prior_art_job(config))
        feed = trainer.epochs()
        return {
            "naive": lambda: timed(lambda: trainer.step(next(feed))),
            "parameters": lambda: sum(p.numel() for p in trainer.model.parameters()),
        }

    from m1clip.hardware.timing import gemm_rate
    from m1clip.model.clip import count_parameters
    from m1clip.training.progress import Screen
    from m1clip.training.run import decode_plan
    from m1clip.training.schedule import lr_schedule
    from m1clip.training.setup import prepare
    from m1clip.training.step import TrainStep

    job = prepare(config, lambda line: None, decode_plan(Screen()))
    update = TrainStep(job.build_model(), job.config, job.device, job.precision, job.preprocess)
    total_steps = round((config.train.epochs or 1) * job.training.plan.steps_per_epoch)
    update.schedule = lr_schedule(config.optim, total_steps)
    done = {False: 0, True: 0}

    def step(full_length: bool) -> dict[str, float]:
        job.training.full_length = full_length
        number, done[full_length] = done[full_length], done[full_length] + 1
        made = []

        def work() -> None:
            batch = job.training[number]
            made.append(batch)
            update(batch, number)[0].item()

        found = timed(work)
        return {**found, "flops": step_flops(job.shape, made[0]), "text_tokens": made[0].tokens.shape[1]}

    return {
        "m1clip": lambda: step(False),
        "full": lambda: step(True),
        "gemm": lambda: gemm_rate(job.device, job.precision),
        "parameters": lambda: count_parameters(job.shape),
        "choices": lambda: {
            "precision": job.precision,
            "attention": job.config.model.attention,
            "threads": torch.get_num_threads(),
        },
    }


def measure(config: Path, steps: int) -> dict[str, Any]:
    """All figures of an alternating run."""
    rounds: list[dict[str, dict[str, float]]] = []
    rates: list[float] = []
    start = [sys.executable, __file__, "--config", str(config), "--worker"]
    with Side([*start, "naive"]) as naive, Side([*start, "m1clip"]) as ours:
        counts = {worker.ask("parameters") for worker in (naive, ours)}
        assert len(counts) == 1, f"the two models differ in size: {counts}"
        choices = ours.ask("choices")
        for turn in range(-2, steps):  # the first two warm up
            order = list(LINES)[:: 1 if turn % 2 else -1]
            found = {name: (naive if name == "naive" else ours).ask(name) for name in order}
            rate = ours.ask("gemm")
            words = ", ".join(f"{name} {found[name]['seconds']:.2f} s" for name in LINES)
            print(f"  round {turn + 1}: {words}", file=sys.stderr)
            if turn >= 0:
                rounds.append(found)
                rates.append(rate)

    def ratio(ours: str, unit: str) -> list[float]:
        return [found["naive"][unit] / found[ours][unit] for found in rounds]

    lists = {name: [found[name]["seconds"] for found in rounds] for name in LINES}
    lists |= {"ratio": ratio("m1clip", "seconds"), "ratio_full": ratio("full", "seconds")}
    lists |= {"ratio_cpu": ratio("m1clip", "cpu_seconds"), "gemm_rate": rates}
    own = [found["m1clip"] for found in rounds]
    lists["gemm_fraction"] = [step["flops"] / step["seconds"] / rate for step, rate in zip(own, rates, strict=True)]
    summary = {name: dataclasses.asdict(timing(values)) for name, values in lists.items()}
    tokens = sum(step["text_tokens"] for step in own) / len(own)
    return {"parameters": counts.pop(), **choices, **summary, "text_tokens": tokens, "rounds": rounds}


def show(result: dict[str, Any]) -> None:
    """The table."""

    def figure(name: str, form: str = ".2f", unit: str = "") -> str:
        return spread(result[name], form, unit)

    place = result["machine"]
    print(
        f"{place['cpu']}, {place['cores']} cores ({result['threads']} threads), torch {place['torch']}, "
        f"commit {place['commit']}, load before {place['load_before']:.1f}"
    )
    count, n = result["parameters"], result["naive"]["n"]
    print(f"{count:,} parameters, batch {result['batch']}, median [quartiles], n={n}")
    for name, words in LINES.items():
        print(f"  {words:32} {figure(name, unit=' s')} per step")
    print(f"  naive / m1clip                   {figure('ratio')} of paired steps (goal {GOAL_RATIO})")
    print(f"  naive / m1clip without trimming  {figure('ratio_full')} of paired steps")
    print(f"  the same in processor seconds    {figure('ratio_cpu')} (other programs do not count here)")
    print(
        f"  fraction of the GEMM rate         {figure('gemm_fraction', '.0%')} "
        f"of {result['gemm_rate']['median'] / 1e9:.0f} GFLOP/s in {result['precision']}"
    )
    peak = result["peak_bytes"] / 1e9
    print(f"  peak RSS of m1clip train         {peak:.2f} GB (goal {GOAL_BYTES / 1e9:.1f})")
    print(
        f"m1clip: {result['precision']}, attention {result['attention']}, "
        f"{result['text_tokens']:.0f} text tokens on average"
    )


def prior_art(quick: bool) -> Config:
    """`--preset prior-art`; for a smoke run the same with a model of two small blocks."""
    config = from_dict(read_preset("prior-art"), "prior-art")
    # One caption an image, as the baseline has it: the step is the same work.
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, captions_per_step=1))
    if not quick:
        return config
    parts = {"width": 64, "layers": 1, "heads": 2}
    small = {f"{tower}_{part}": value for tower in ("vision", "text") for part, value in parts.items()}
    model = dataclasses.replace(config.model, image_size=64, embed_dim=64, **small)  # type: ignore[arg-type]
    return dataclasses.replace(config, model=model)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=15, help="rounds to measure, after two that warm up")
    parser.add_argument("--quick", action="store_true", help="a tiny model, two rounds: a smoke test")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--config", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        answers = answers_of(options.worker, load_config(options.config))
        for line in sys.stdin:
            print(json.dumps({"answer": answers[line.strip()]()}), flush=True)
        return
    config, steps = prior_art(options.quick), 2 if options.quick else options.steps
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, device="cpu"))
    result: dict[str, Any] = {"machine": machine(), "batch": config.train.batch_size, "quick": options.quick}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.toml"
        path.write_text(to_toml(config), encoding="utf-8")
        result["peak_bytes"] = peak_memory(["--config", str(path), "--steps", "4"])
        result |= measure(path, steps)
    show(result)
    if options.json:
        write(options.json, result)


if __name__ == "__main__":
    main()
