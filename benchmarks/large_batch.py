"""Exact large batch: what --micro-batch costs in time, saves in memory and does to the gradient; also open_clip.

    python benchmarks/large_batch.py --peers PEERS/bin/python --json docs/results/large_batch.json

Plain and chunked steps of the same batch are made in turn, each in a process of its own, so that
each has a peak of its own. The gradients are those of one pass and of chunks over the same samples
in fp32, parameter by parameter.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sides import (
    NO_PEERS,
    Side,
    figures,
    in_turn,
    machine,
    peer_shape,
    set_up,
    spread,
    training_step,
    write,
)

from m1clip.config import Config, DataConfig, ModelConfig, TrainConfig, load_config, to_toml

PEER = Path(__file__).parent / "peers" / "open_clip_accum.py"
GOAL_RATIO, GOAL_DIFFERENCE = 1.4, 1e-5
SIDES = {
    "plain": "m1clip, the complete batch at once",
    "chunked": "m1clip --micro-batch",
    "peer_plain": "open_clip, the complete batch at once",
    "peer_accum": "open_clip --accum-freq",
}


def job_config(model: str, batch: int, chunk: int) -> Config:
    """Synthetic images, a batch in chunks or (0) at once."""
    return Config(
        model=ModelConfig(name=model),
        data=DataConfig(synthetic_images=2 * batch, captions_per_step=1),
        train=TrainConfig(batch_size=batch, micro_batch=chunk, steps=100, device="cpu"),
    )


def peak_bytes() -> int:
    """The most memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def answers_of(config: Config) -> dict[str, Callable[[], Any]]:
    """What a process with one of our sides can be asked."""
    import torch

    job = set_up(config)
    update = training_step(job)
    done = 0

    def step() -> float:
        nonlocal done
        batch = job.training[done]
        begin = time.perf_counter()
        update.run(batch, done)[0].item()
        done += 1
        return time.perf_counter() - begin

    return {
        "step": step,
        "peak": peak_bytes,
        "facts": lambda: {
            "precision": job.precision,
            "threads": torch.get_num_threads(),
            "text_tokens": int(job.training[0].tokens.shape[1]),
            "shape": peer_shape(job.shape),
        },
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    result: dict[str, Any] = {
        "machine": machine(),
        "model": options.model,
        "batch": options.batch_size,
        "chunk": options.micro_batch,
        "quick": options.quick,
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        commands = {}
        for side, chunk in (("plain", 0), ("chunked", options.micro_batch)):
            path = folder / f"{side}.toml"
            path.write_text(
                to_toml(job_config(options.model, options.batch_size, chunk)), encoding="utf-8"
            )
            commands[side] = [sys.executable, __file__, "--worker", str(path)]
        with Side(commands["plain"]) as plain, Side(commands["chunked"]) as chunked:
            result |= plain.ask("facts")
            sides = {"plain": lambda: plain.ask("step"), "chunked": lambda: chunked.ask("step")}
            seconds = in_turn(sides, options.rounds, warmup=1)
            result["peak_bytes"] = {"plain": plain.ask("peak"), "chunked": chunked.ask("peak")}
        result["seconds"] = {side: figures(values[side] for values in seconds) for side in sides}
        result["ratio"] = figures(values["chunked"] / values["plain"] for values in seconds)
        result["peer"] = ask_peer(options, result, folder) if options.peers else None
    return result


def ask_peer(options: argparse.Namespace, result: dict[str, Any], folder: Path) -> dict[str, Any]:
    """open_clip's accumulation on the same shape and batch; each way in a process of its own."""
    accum = options.batch_size // options.micro_batch
    job = {key: result[key] for key in ("shape", "batch", "chunk", "text_tokens", "threads")}
    job["precision"] = "amp_bf16" if result["precision"] == "bf16" else "fp32"
    (folder / "peer.json").write_text(json.dumps(job), encoding="utf-8")
    command = [options.peers, str(PEER), str(folder / "peer.json")]
    with Side(command) as full, Side(command) as parts:
        sides = {
            "peer_plain": lambda: full.ask({"do": "step", "accum": 1}),
            "peer_accum": lambda: parts.ask({"do": "step", "accum": accum}),
        }
        seconds = in_turn(sides, options.rounds, warmup=1)
        peaks = {"peer_plain": full.ask({"do": "peak"}), "peer_accum": parts.ask({"do": "peak"})}
        return {
            "versions": full.ask({"do": "versions"}),
            "accum": accum,
            "seconds": {side: figures(values[side] for values in seconds) for side in sides},
            "peak_bytes": peaks,
            "ratio": figures(values["peer_accum"] / values["peer_plain"] for values in seconds),
            "gradients": parts.ask({"do": "gradients"}),
        }


def show(result: dict[str, Any]) -> None:
    """The tables."""
    facts, n = result["machine"], result["ratio"]["n"]
    print(
        f"{facts['cpu']}, {facts['cores']} cores ({result['threads']} threads), torch"
        f" {facts['torch']}, commit {facts['commit']}, {result['precision']}"
    )
    print(
        f"{result['model']}, batch {result['batch']}, chunk {result['chunk']}; median [quartiles],"
        f" n={n}"
    )
    peer = result["peer"]
    for side, words in SIDES.items():
        part = peer if side.startswith("peer") else result
        if part is not None:
            peak = part["peak_bytes"][side] / 1e9
            print(
                f"  {words:36} {spread(part['seconds'][side], unit=' s')} a step, peak {peak:.2f} GB"
            )
    print(
        f"  m1clip chunked / plain               {spread(result['ratio'])} of paired steps (goal {GOAL_RATIO})"
    )
    if peer is not None:
        print(f"  open_clip accumulated / plain        {spread(peer['ratio'])} of paired steps")
    if peer is None:
        print(f"open_clip: {NO_PEERS}")
        return
    gradients = peer["gradients"]
    print(
        f"open_clip {peer['versions']['open_clip']}, --accum-freq {peer['accum']}, against its own"
        " single pass, fp32"
    )
    print(
        f"  gradient of the temperature {gradients['temperature_ratio']:.2f} times the right one; "
        f"worst other parameter {gradients['worst_tower_parameter']:.1e}"
    )
    print(
        f"  each image encoded {gradients['encodings_of_a_image']:.0f} times (m1clip: 2), the loss over all "
        f"features and its gradient taken {gradients['losses_over_all_features']} times (m1clip: 1)"
    )


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="original", help="preset")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument(
        "--rounds", type=int, default=5, help="rounds to measure, after one that warms up"
    )
    parser.add_argument("--peers", default=os.environ.get("PEERS"), help="a Python with open_clip")
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model, two rounds: a smoke test"
    )
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        answers = answers_of(load_config(options.worker))
        for line in sys.stdin:
            print(json.dumps({"answer": answers[line.strip()]()}), flush=True)
        return
    if options.quick:
        options.model, options.batch_size, options.micro_batch, options.rounds = "tiny", 8, 4, 2
    result = measure(options)
    show(result)
    if options.json:
        write(options.json, result)


if __name__ == "__main__":
    main()
