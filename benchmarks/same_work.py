"""Same work: seconds of one training step of m1clip, the naive baseline, open_clip and Hugging Face, in turn.

    python benchmarks/same_work.py --peers PEERS/bin/python --json docs/results/same_work.json
    python benchmarks/same_work.py --precision fp32 --cpu-seconds --sides m1clip,open_clip,hugging_face

Each side runs in its own process and waits while another works. The peers use their fastest
settings, found by a short probe, on inputs prepared in advance; m1clip and the baseline also create
their batches. Text length, vocabulary, AdamW and class token are the same for all; the default
training of m1clip is a separate line.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from sides import (
    NO_PEERS,
    RESULTS,
    Side,
    figures,
    in_turn,
    machine,
    peer_shape,
    set_up,
    spread,
    step_flops,
    training_step,
    write,
)

from m1clip.config import (
    Config,
    DataConfig,
    ModelConfig,
    TrainConfig,
    from_dict,
    load_config,
    read_preset,
    to_toml,
)
from m1clip.model.presets import clip_config, model_config

PEER = Path(__file__).parent / "peers" / "steps.py"
# Ways a library can run; a probe takes the fastest of each line, which then stands in the
# alternation.
VARIANTS = {
    "open_clip": ("open_clip amp_bf16",),
    "open_clip_pure": ("open_clip pure_bf16",),
    "hugging_face": ("hugging_face sdpa amp_bf16", "hugging_face eager amp_bf16"),
    "hugging_face_pure": ("hugging_face sdpa pure_bf16", "hugging_face eager pure_bf16"),
}
FP32_VARIANTS = {  # on a CPU without bf16 instructions, where m1clip also uses fp32
    "open_clip": ("open_clip fp32",),
    "hugging_face": ("hugging_face sdpa fp32", "hugging_face eager fp32"),
}
# In the order of the table. Weights in bf16 lose small updates: less work than m1clip does, so they
# stand apart.
SIDES = {
    "naive": "naive baseline, fp32",
    "open_clip": "open_clip",
    "open_clip_pure": "open_clip, bf16 weights",
    "hugging_face": "Hugging Face",
    "hugging_face_pure": "Hugging Face, bf16 weights",
    "m1clip": "m1clip, the same work",
    "trimmed": "m1clip without text padding",
    "default": "m1clip with its default settings",
}
OWN = ("m1clip", "trimmed", "default")
ISA_LIMITS = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")
GOALS = {
    ("76.7M", "open_clip"): 1.35,
    ("76.7M", "naive"): 2.9,
    ("tiny-32", "open_clip"): 2.0,
    ("tiny-50", "open_clip"): 2.0,
}


def job_config(name: str, data: str | None, quick: bool, precision: str = "auto") -> Config:
    """The original project's job, ViT-B-32, or `tiny` with 32 or 50 text tokens.

    For a smoke run the same with small towers.
    """
    if name == "76.7M":
        config = from_dict(read_preset("original"), "original").with_values(
            workers=0, loss="multi-positive", warmup=0.1
        )
    elif name == "ViT-B-32":
        config = Config(
            model=ModelConfig(name=name, context_length=32),
            data=DataConfig(synthetic_images=256),
            train=TrainConfig(batch_size=32, steps=1000),
        )
    else:
        source = (
            DataConfig(source=(data,), cache="ram") if data else DataConfig(synthetic_images=1024)
        )
        # A tower that the peers can build: patches instead of our stem, six blocks and four.
        context = int(name.removeprefix("tiny-"))
        model = ModelConfig(
            name="tiny", vision_layers=6, text_layers=4, context_length=context, stem="patch"
        )
        config = Config(model=model, data=source, train=TrainConfig(batch_size=128, steps=1000))
    if quick:
        parts = {"width": 64, "layers": 1}
        small: Any = {
            f"{tower}_{part}": value
            for tower in ("vision", "text")
            for part, value in parts.items()
        }
        model = dataclasses.replace(config.model, image_size=64, embed_dim=64, **small)
        train = dataclasses.replace(config.train, batch_size=12)
        config = dataclasses.replace(config, model=model, train=train)
    return config.with_values(device="cpu", precision=precision)


def same_work(config: Config) -> Config:
    """The config that does what the peers do: AdamW, a class token, one caption an image."""
    model = model_config(config.model, clip_config(config.model))
    if model.name == "tiny":  # its towers, with the class token of the other presets
        model = dataclasses.replace(model, name="ViT-S-16")
    return dataclasses.replace(
        config,
        model=model,
        data=dataclasses.replace(
            config.data, captions_per_step=1, patch_dropout=0.0, word_dropout=0.0
        ),
        optim=dataclasses.replace(config.optim, optimizer="adamw"),
    )


def timed(step: Callable[[], object]) -> dict[str, float]:
    """Seconds of a call, and processor seconds of all its threads."""
    begin, used = time.perf_counter(), time.process_time()
    step()
    return {"seconds": time.perf_counter() - begin, "cpu_seconds": time.process_time() - used}


def serve(side: str, config: Config) -> None:
    """The process of a side: answer words until the input ends."""
    answers = naive_answers(config) if side == "naive" else own_answers(config)
    for line in sys.stdin:
        print(json.dumps({"answer": answers[line.strip()]()}), flush=True)


def naive_answers(config: Config) -> dict[str, Callable[[], Any]]:
    """The baseline of naive.py on this job."""
    from naive import NaiveTrainer, original_job

    # It takes images as they are kept, so they must be kept without the margin for crops.
    same = same_work(config)
    plain = dataclasses.replace(same.data, crop_min=1.0, flip=0.0, color_jitter=0.0)
    trainer = NaiveTrainer(original_job(dataclasses.replace(same, data=plain)))
    feed = trainer.epochs()
    return {"naive": lambda: timed(lambda: trainer.step(next(feed)))}


def own_answers(config: Config) -> dict[str, Callable[[], Any]]:
    """m1clip: the same work as the peers, the same with its text trimmed, and its defaults; facts.

    The rate.
    """
    import torch

    from m1clip.hardware.timing import gemm_rate
    from m1clip.model.clip import count_parameters

    @functools.cache  # built when first asked for: a second model in the process would slow down the first
    def side(name: str) -> tuple[Any, Callable[[bool], dict[str, float]]]:
        job = set_up(same_work(config) if name == "same" else config)
        update = training_step(job)
        done = iter(range(10**9))

        def step(full_length: bool) -> dict[str, float]:
            number, made = next(done), []
            job.training.full_length = full_length

            def work() -> None:
                made.append(job.training[number])
                update.run(made[0], number)[0].item()

            timing_of_step = timed(work)
            groups = [made[0].texts(rows) for rows in made[0].text_rows()]
            tokens = sum(group.numel() for group in groups) / sum(len(group) for group in groups)
            return {
                **timing_of_step,
                "flops": step_flops(job.shape, made[0]),
                "text_tokens": tokens,
                "samples": len(made[0].tokens),
            }

        return job, step

    def facts(name: str) -> dict[str, Any]:
        job, _ = side(name)
        return {
            "shape": peer_shape(job.shape),
            "batch": config.train.batch_size,
            "text_tokens": job.shape.context_length,
            "threads": torch.get_num_threads(),
            "parameters": count_parameters(job.shape),
            "precision": job.precision,
        }

    return {
        "m1clip": lambda: side("same")[1](True),
        "trimmed": lambda: side("same")[1](False),
        "default": lambda: side("default")[1](False),
        "gemm": lambda: gemm_rate(side("default")[0].device, side("default")[0].precision),
        "facts": lambda: facts("same"),
        "default_facts": lambda: facts("default"),
    }


def probe(peer: Side, names: tuple[str, ...]) -> dict[str, float]:
    """Seconds of a step of each way a library can run: the better of two after one that warms up."""
    seconds = {}
    for name in names:
        question = {"do": "step", "variant": name}
        peer.ask(question)
        seconds[name] = min(peer.ask(question)["seconds"] for _ in range(2))
        print(f"  probe {name}: {seconds[name]:.2f} s", file=sys.stderr)
        peer.ask({"do": "drop", "variant": name})
    return seconds


def measure(
    config: Config,
    rounds: int,
    peers: str | None,
    compiled: bool,
    sides: Collection[str] = tuple(SIDES),
) -> dict[str, Any]:
    """All figures of one job, from an alternating run of some sides."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        path = folder / "job.toml"
        facts_path = folder / "job.json"
        path.write_text(to_toml(config), encoding="utf-8")
        start = [sys.executable, __file__, "--config", str(path), "--worker"]
        own = stack.enter_context(Side([*start, "m1clip"]))
        facts = own.ask("facts")
        asks: dict[str, Callable[[], Any]] = {
            name: functools.partial(own.ask, name) for name in OWN if name in sides
        }
        if "naive" in sides:
            naive = stack.enter_context(Side([*start, "naive"]))
            asks["naive"] = functools.partial(naive.ask, "naive")
        if not peers:
            return {**facts, **alternate(asks, own, rounds)}
        facts_path.write_text(json.dumps(facts), encoding="utf-8")
        peer = stack.enter_context(Side([peers, str(PEER), str(facts_path)]))
        facts["versions"] = peer.ask({"do": "versions"})
        facts["probe"] = {}
        facts["chosen"] = {}
        libraries = VARIANTS if facts["precision"] == "bf16" else FP32_VARIANTS
        for library, variants in libraries.items():
            if library not in sides:
                continue
            more = tuple(f"{name} compiled" for name in variants) if compiled else ()
            names = variants + more
            tried = probe(peer, names) if len(names) > 1 else {}
            best = min(tried, key=tried.__getitem__, default=names[0])
            facts["probe"] |= tried
            facts["chosen"][library] = best
            asks[library] = functools.partial(peer.ask, {"do": "step", "variant": best})
        return {**facts, **alternate(asks, own, rounds)}


def alternate(asks: dict[str, Callable[[], Any]], own: Side, rounds: int) -> dict[str, Any]:
    """Steps in turn; then medians, quartiles and ratios of paired steps."""
    names = [name for name in SIDES if name in asks]
    turns = in_turn(
        {name: asks[name] for name in names} | {"gemm": lambda: own.ask("gemm")}, rounds
    )
    return summary(
        [{name: figures_of_round[name] for name in names} for figures_of_round in turns],
        [figures_of_round["gemm"] for figures_of_round in turns],
    )


def summary(rounds: list[dict[str, dict[str, float]]], rates: list[float]) -> dict[str, Any]:
    """Timings of each side, and how many times longer than m1clip it takes: paired steps of a round."""
    names = list(rounds[0])
    own = [figures_of_round["m1clip"] for figures_of_round in rounds]
    return {
        "gemm_rate": figures(rates),
        "seconds": {name: figures([f[name]["seconds"] for f in rounds]) for name in names},
        "cpu_seconds": {name: figures([f[name]["cpu_seconds"] for f in rounds]) for name in names},
        "ratio": {
            n: figures([f[n]["seconds"] / f["m1clip"]["seconds"] for f in rounds]) for n in names
        },
        "ratio_cpu": {
            n: figures([f[n]["cpu_seconds"] / f["m1clip"]["cpu_seconds"] for f in rounds])
            for n in names
        },
        "gemm_fraction": figures(
            [s["flops"] / s["seconds"] / rate for s, rate in zip(own, rates, strict=True)]
        ),
        "limit_seconds": figures([s["flops"] / rate for s, rate in zip(own, rates, strict=True)]),
        "tokens": {
            n: sum(f[n]["text_tokens"] for f in rounds) / len(rounds) for n in names if n in OWN
        },
        "samples": {
            n: sum(f[n]["samples"] for f in rounds) / len(rounds) for n in names if n in OWN
        },
        "rounds": rounds,
    }


def show(
    name: str,
    job_result: dict[str, Any],
    clock: str = "seconds",
    sides: Collection[str] = tuple(SIDES),
) -> None:
    """The table of one job, in seconds or processor seconds."""
    ratios = job_result["ratio" if clock == "seconds" else "ratio_cpu"]
    unit = " s" if clock == "seconds" else " CPU s"
    count = job_result["seconds"]["m1clip"]["n"]
    print(
        f"\n{name}: {job_result['parameters']:,} parameters, batch {job_result['batch']},"
        f" {job_result['text_tokens']} text tokens, "
        f"{job_result['threads']} threads; median [quartiles], n={count} rounds in turn"
    )
    for side, words in SIDES.items():
        if side not in sides:
            continue
        if side not in job_result["seconds"]:
            if job_result["precision"] == "bf16" or not side.endswith("_pure"):
                print(f"  {words:32} {NO_PEERS}")
            continue
        how = (
            f" ({job_result['chosen'][side].partition(' ')[2]})"
            if side in job_result.get("chosen", {})
            else ""
        )
        how = (
            f" ({job_result['samples'][side]:.0f} samples of {job_result['tokens'][side]:.0f} tokens)"
            if side in OWN
            else how
        )
        goal = f" (goal {GOALS[name, side]})" if (name, side) in GOALS else ""
        print(
            f"  {words:32} {spread(job_result[clock][side], '.3f', unit)}{how}; "
            f"{spread(ratios[side])} times m1clip{goal}"
        )
    if clock != "seconds":
        return
    rate = job_result["gemm_rate"]["median"] / 1e9
    print(
        f"  {'limit of the matmuls':32} {spread(job_result['limit_seconds'], '.3f', ' s')} at "
        f"{rate:.0f} GFLOP/s; m1clip reaches {spread(job_result['gemm_fraction'], '.0%')}"
    )


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--jobs", default="76.7M,tiny-32,tiny-50", help="which, with commas between; also ViT-B-32"
    )
    parser.add_argument(
        "--sides",
        default=",".join(SIDES),
        help="which to measure, with commas between; m1clip must be one of them",
    )
    parser.add_argument("--precision", default="auto", choices=("auto", "fp32", "bf16"))
    parser.add_argument(
        "--cpu-seconds",
        action="store_true",
        help="compare processor seconds, where the machine also does something else",
    )
    parser.add_argument(
        "--rounds", type=int, default=7, help="rounds to measure, after two that warm up"
    )
    parser.add_argument(
        "--peers", default=os.environ.get("PEERS"), help="a Python with open_clip and transformers"
    )
    parser.add_argument("--data", help="captions and images for tiny; else synthetic ones")
    parser.add_argument(
        "--try-compile", action="store_true", help="probe the peers with torch.compile too"
    )
    parser.add_argument(
        "--quick", action="store_true", help="small towers, two rounds: a smoke test"
    )
    parser.add_argument(
        "--json", type=Path, help=f"write the figures there, as {RESULTS.name}/same_work.json"
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--config", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return serve(options.worker, load_config(options.config))
    # No path of this machine in a result.
    data = Path(options.data).name if options.data else "synthetic"
    result: dict[str, Any] = {
        "machine": machine(),
        "quick": options.quick,
        "data": data,
        "sides": options.sides.split(","),
        "clock": "cpu_seconds" if options.cpu_seconds else "seconds",
        # Limits of the instructions that the libraries may use, such as ONEDNN_MAX_CPU_ISA.
        "instructions": {name: os.environ[name] for name in ISA_LIMITS if name in os.environ},
        "jobs": {},
    }
    for name in options.jobs.split(","):
        config = job_config(name, options.data, options.quick, options.precision)
        rounds = 2 if options.quick else options.rounds
        job_result = measure(config, rounds, options.peers, options.try_compile, result["sides"])
        result["jobs"][name] = job_result
        show(name, job_result, result["clock"], result["sides"])
        if options.json:  # after each job: what was measured is kept if the next one is stopped
            write(options.json, result)
    return None


if __name__ == "__main__":
    main()
