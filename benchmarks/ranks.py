"""Scaling of training with the number of ranks: images per second of 1, 2 and 4 processes on cores pinned apart.

    python benchmarks/ranks.py --json docs/results/ranks.json
    python benchmarks/ranks.py --ranks 1 2 4 8 --cores 2 --model original --batch-size 32
    python benchmarks/ranks.py --device cuda --ranks 1          # also the time of NCCL's calls with one rank
    python benchmarks/ranks.py --overlap                        # also the gain of exchanges during the backward pass
    python benchmarks/ranks.py --trace trace.json --ranks 2     # one step of rank 0, for chrome://tracing or Perfetto
    python benchmarks/ranks.py --limits                         # memory and matmuls of as many processes
    python benchmarks/ranks.py --independent                    # as many processes without communication
    python benchmarks/ranks.py --ceiling                        # both in turn
    python benchmarks/ranks.py --paired --ranks 2 --cores 4     # one and two ranks in turn, in the same processes
    python benchmarks/ranks.py --gloo                           # every other step with gloo instead of shared memory
    python benchmarks/ranks.py --device cuda --wrapped          # one rank with exchange over NCCL, and with FSDP2
    sudo RATE=1gbit PYTHON=.venv/bin/python tools/two_nodes.sh benchmarks/ranks.py --worker --overlap  # slow link

The batch of a rank is the same for any number of ranks (--total: the batch of all). Rounds with
each number of ranks alternate. Efficiency is the speed of n ranks divided by n times that of one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sides import machine, set_up, spread, write

from m1clip.config import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig
from m1clip.formatting import plural
from m1clip.hardware.machine_info import environment
from m1clip.hardware.timing import timing
from m1clip.optimizers import DEFAULT_OPTIMIZER, OPTIMIZERS

if TYPE_CHECKING:
    from m1clip.training.compose import TrainStep
    from m1clip.training.distributed import Ranks
    from m1clip.training.inputs import RunInputs

WARMUP = 3
LIMIT_SECONDS = 2.0  # for each of the `limits`


def work(options: argparse.Namespace) -> dict[str, Any] | None:
    """Train some steps as one rank; the first one returns the seconds of each."""
    import torch

    from m1clip.bench.plan import sent_bytes
    from m1clip.training.distributed import GradientExchange, connect

    ranks = connect(options.device)
    if options.paired:
        return paired(options, ranks)
    completed, overlapping = GradientExchange._completed, [True]

    def if_overlapping(self: GradientExchange, *bucket: Any) -> None:
        if overlapping[0]:  # else all buckets are sent after the backward pass
            completed(self, *bucket)

    GradientExchange._completed = if_overlapping  # type: ignore[method-assign]
    batch = options.batch_size * (1 if options.total else ranks.size)
    cuda = options.device == "cuda"
    job = set_up(config_of(options, batch)).for_rank(ranks)
    step, seconds, exchanges = job.make_step(), [], []
    use_gloo = alternate_with_gloo(step) if options.gloo and ranks.host is not None else None
    # Every other step is made differently; the others are counted.
    stride = 1 + (options.overlap or use_gloo is not None)
    parts: dict[str, float] = {}
    other_parts: dict[str, float] = {}
    for number in range(stride * (WARMUP + options.steps)):
        is_own = number % stride == 0
        if use_gloo is not None:
            use_gloo(not is_own)
        overlapping[0] = not options.overlap or is_own
        begin = time.perf_counter()
        step.run(job.training[number], number)
        job.device.synchronize()
        seconds.append(time.perf_counter() - begin)
        phases = step.phases.take()
        exchanges.append(phases.get("exchange", 0.0))
        if number >= stride * WARMUP:
            sums = parts if is_own else other_parts
            for name, value in phases.items():
                sums[name] = sums.get(name, 0.0) + value / options.steps
    if use_gloo is not None:
        use_gloo(False)
    overlap = None
    if options.trace and ranks.size > 1:
        overlap = traced_overlap(options, lambda number: step.run(job.training[number], number))
        ranks.gather(torch.zeros(1))
    own, others = (slice(stride * WARMUP + first, None, stride) for first in range(2))
    result = {"batch": batch, "seconds": seconds[own], "exchange": exchanges[own], "parts": parts}
    if overlap is not None:
        result["traced_overlap"] = overlap
    if options.overlap:
        result["overlap"] = [
            late / during for during, late in zip(seconds[own], seconds[others], strict=True)
        ]
    if use_gloo is not None:
        result |= {"gloo": seconds[others], "gloo_parts": other_parts}
    if ranks.size > 1:
        # What `m1clip plan --ranks` would add to the step of one rank.
        sent = sent_bytes(
            sum(p.numel() for p in step.model.parameters()),
            batch,
            step.model.config.embed_dim,
            ranks.size,
            options.optimizer,
            job.precision,
        )
        result["predicted_exchange"] = sent / ranks.bandwidth(job.device.torch)
    if cuda and ranks.size == 1:
        result["nccl"] = nccl_seconds(
            [p for p in step.model.parameters() if p.requires_grad], options.steps
        )
    return result if ranks.rank == 0 else None


def config_of(options: argparse.Namespace, batch: int) -> Config:
    """The measured steps with a batch of all ranks together."""
    return Config(
        model=ModelConfig(name=options.model, cuda_graph=False),
        data=DataConfig(synthetic_images=max(256, batch), captions_per_step=1),
        optim=OptimConfig(optimizer=options.optimizer),
        train=TrainConfig(
            batch_size=batch,
            steps=100,
            device=options.device,
            precision="bf16",
            threads=0 if options.device == "cuda" else options.cores,
            fsdp=options.fsdp,
        ),
    )


def paired(options: argparse.Namespace, ranks: Ranks) -> dict[str, Any] | None:
    """Seconds of steps in rounds: of the first process alone, and of all as ranks.

    With --ceiling also of all without communication. A process that has nothing to do sleeps. The
    first step of a block, in which the processes arrive, is not counted.
    """
    import torch

    batch = options.batch_size * ranks.size
    jobs = {
        "alone": set_up(config_of(options, options.batch_size)),
        "ranks": set_up(config_of(options, batch)).for_rank(ranks),
    }
    jobs["independent"] = jobs["alone"]
    steps = {"alone": jobs["alone"].make_step(), "ranks": jobs["ranks"].make_step()}
    steps["independent"] = steps["alone"]
    kinds = ["alone", *(["independent"] if options.ceiling else []), "ranks"]
    rounds: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
    for round_number in range(1 + options.rounds):  # the first one warms up
        for kind, blocks in rounds.items():
            ranks.gather(torch.zeros(1))  # wait for the others
            if kind == "alone" and ranks.rank:
                continue
            seconds = []
            for number in range(1 + options.steps):
                begin = time.perf_counter()
                steps[kind].run(jobs[kind].training[number], number)
                seconds.append(time.perf_counter() - begin)
            if round_number:
                blocks.append(seconds[1:])
    return {"batch": batch, **rounds} if ranks.rank == 0 else None


def paired_figures(size: int, result: dict[str, Any]) -> dict[str, list[float]]:
    """Of each round: efficiency by the median and by the mean step, and of what limits it."""
    medians, means = (
        {
            kind: list(map(average, result[kind]))
            for kind in ("alone", "independent", "ranks")
            if kind in result
        }
        for average in (statistics.median, statistics.mean)
    )

    def ratio(seconds: dict[str, list[float]], kind: str, other: str) -> list[float]:
        return [a / b for a, b in zip(seconds[kind], seconds[other], strict=True)]

    ceiling = {}
    if "independent" in result:
        ceiling = {
            "independent": ratio(medians, "alone", "independent"),
            "of_independent": ratio(medians, "independent", "ranks"),
        }
    return {
        "images_per_second_alone": [
            result["batch"] / size / seconds for seconds in medians["alone"]
        ],
        "images_per_second": [result["batch"] / seconds for seconds in medians["ranks"]],
        "efficiency": ratio(medians, "alone", "ranks"),
        "efficiency_of_means": ratio(means, "alone", "ranks"),
        **ceiling,
    }


def measure_paired(options: argparse.Namespace, sizes: list[int]) -> dict[str, Any]:
    """Figures of each number of ranks, printed and as rows for tools/results_table.py."""
    result: dict[str, Any] = {
        "machine": machine(),
        "options": {**vars(options), "json": None, "trace": None, "profile": None},
        "ranks": {},
        "step_seconds": {},
        "rows": [],
    }
    for size in sizes:
        measured = run(options, size)
        figures = {name: timing(values) for name, values in paired_figures(size, measured).items()}
        result["step_seconds"][size] = {kind: measured[kind] for kind in ("alone", "ranks")}
        result["ranks"][size] = {
            name: dataclasses.asdict(values) for name, values in figures.items()
        }
        words = (
            f"efficiency **{spread(figures['efficiency'])}**, by the mean step"
            f" {spread(figures['efficiency_of_means'])}"
        )
        if "independent" in figures:
            words += f"; without communication {spread(figures['independent'])}"
        what = (
            f"{size} ranks on {plural(options.cores, 'core')} each: `{options.model}`,"
            f" {options.optimizer}, {options.batch_size} images per rank"
        )
        command = (
            f"python benchmarks/ranks.py --paired{' --ceiling' * options.ceiling} --ranks {size}"
            f" --cores {options.cores} --model"
            f" {options.model} --batch-size {options.batch_size} --steps {options.steps} --rounds"
            f" {options.rounds}"
        )
        n = str(options.rounds)
        result["rows"].append({"what": what, "figure": words, "n": n, "command": command})
        print(f"  {what}: {words}, n={n}", flush=True)
    return result


def limits(options: argparse.Namespace) -> dict[str, float]:
    """What the cores of one process can do: copy memory and multiply matrices, without m1clip."""
    import torch

    torch.set_num_threads(options.cores)
    source = torch.ones(1 << 27)  # 512 MB: more than the caches
    target = torch.empty_like(source)
    matrix = torch.ones(2048, 2048, dtype=torch.bfloat16)
    figures = {}
    for name, call, amount in (
        ("copied_gb_per_second", lambda: target.copy_(source), 2 * source.nbytes / 1e9),
        ("bf16_tflop_per_second", lambda: matrix @ matrix, 2 * 2048**3 / 1e12),
    ):
        call()
        count, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < LIMIT_SECONDS:
            call()
            count += 1
        figures[name] = amount * count / (time.perf_counter() - begin)
    return figures


def alternate_with_gloo(step: TrainStep) -> Callable[[bool], None]:
    """A function that makes the next steps exchange by gloo, or through shared memory again."""
    world = step.parts.world
    exchange, ranks = world.exchange, world.ranks
    host, transports = ranks.host, {True: None, False: None}

    def use_gloo(is_gloo: bool) -> None:
        transports[ranks.host is None] = exchange._transport
        exchange._transport = transports[is_gloo]
        ranks.host = None if is_gloo else host

    return use_gloo


def traced_overlap(options: argparse.Namespace, step: Callable[[int], object]) -> dict[str, float]:
    """Milliseconds in which gradients are exchanged during one step, and of them those in which layers go backward."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        step(0)
    path = options.trace if int(os.environ["RANK"]) == 0 else Path(os.devnull)
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(own))
        if path != Path(os.devnull):
            path.write_bytes(own.read_bytes())
        events = json.loads(own.read_text())["traceEvents"]
    timed = [event for event in events if event.get("ph") == "X" and "dur" in event]
    sent = [
        event
        for event in timed
        if event["name"] == "shared_memory:all_reduce"
        or ("all_reduce" in event["name"] and "gloo" in event["name"])
    ]
    backward = [event for event in timed if "evaluate_function" in event["name"]]
    spans = union([(e["ts"], e["ts"] + e["dur"]) for e in sent])
    layers = union([(e["ts"], e["ts"] + e["dur"]) for e in backward])
    shared = sum(
        max(0.0, min(end, other_end) - max(begin, other_begin))
        for begin, end in spans
        for other_begin, other_end in layers
    )
    total = sum(end - begin for begin, end in spans)
    return {
        "exchange_ms": total / 1e3,
        "during_backward_ms": shared / 1e3,
        "fraction": shared / max(total, 1e-9),
    }


def union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Intervals that do not overlap."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def wrapped(options: argparse.Namespace) -> dict[str, Any]:
    """Steps of one process without ranks, with the exchange of gradients, and with FSDP2, on a group of one rank.

    A run of one rank exchanges nothing: here the parts are built as for several, so that every call
    is made.
    """
    import torch.distributed as dist

    from m1clip.training.compose import compose_step
    from m1clip.training.distributed import Ranks
    from m1clip.training.step import make_parts

    cuda = options.device == "cuda"
    store = dist.TCPStore("127.0.0.1", free_port(), 1, True)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    jobs = {}
    for name in ("no ranks", "exchange", "fsdp"):
        config = Config(
            model=ModelConfig(name=options.model, cuda_graph=False),
            data=DataConfig(
                synthetic_images=max(256, options.batch_size), captions_per_step=1, patch_dropout=0.0
            ),
            optim=OptimConfig(optimizer="adamw"),
            train=TrainConfig(
                batch_size=options.batch_size, steps=100, device=options.device, precision="bf16",
                threads=0 if cuda else options.cores, fsdp="on" if name == "fsdp" else "off",
            ),
        )  # fmt: skip
        ranks = Ranks(0, 1, store, ("this process",))
        job = set_up(config).for_rank(ranks)
        ranks.size = 1 if name == "no ranks" else 2
        parts = make_parts(
            job.build_model(), job.config, job.device, job.precision, job.model.preprocess,
            ranks=ranks,
        )  # fmt: skip
        ranks.size = 1
        jobs[name] = job, compose_step(parts)
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    host_seconds: dict[str, list[float]] = {name: [] for name in jobs}
    losses: dict[str, list[float]] = {name: [] for name in jobs}
    for number in range(WARMUP + options.steps):
        for name, (job, step) in jobs.items():
            batch = job.training[number]
            job.device.synchronize()
            begin = time.perf_counter()
            result = step.run(batch, number)
            host_seconds[name].append(time.perf_counter() - begin)
            job.device.synchronize()
            seconds[name].append(time.perf_counter() - begin)
            losses[name].append(float(result.loss))
    if options.profile:
        options.profile.mkdir(parents=True, exist_ok=True)
        for name, (job, step) in jobs.items():
            write_profile(options.profile / name.replace(" ", "_"), job, step)
    dist.destroy_process_group()
    own = {name: values[WARMUP:] for name, values in seconds.items()}
    return {
        "wrapped": {name: dataclasses.asdict(timing(values)) for name, values in own.items()},
        "ratio": {
            name: dataclasses.asdict(
                timing([alone / two for alone, two in zip(own["no ranks"], values, strict=True)])
            )
            for name, values in own.items()
        },
        # Until the host has launched all of a step; less than the step if the GPU is slower.
        "host": {
            name: dataclasses.asdict(timing(values[WARMUP:]))
            for name, values in host_seconds.items()
        },
        "last_loss": {name: values[-1] for name, values in losses.items()},
    }


def write_profile(path: Path, job: RunInputs, step: TrainStep) -> None:
    """Where the host spends its time in five steps, in Python functions and in operators."""
    import cProfile
    import pstats

    from torch.profiler import ProfilerActivity, profile

    batch = job.training[0]
    job.device.synchronize()
    calls = cProfile.Profile()
    calls.enable()
    for number in range(5):
        step.run(batch, number)
    calls.disable()
    job.device.synchronize()
    with path.with_suffix(".calls.txt").open("w") as file:
        pstats.Stats(calls, stream=file).sort_stats("tottime").print_stats(40)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        for number in range(2):
            step.run(batch, number)
        job.device.synchronize()
    averages = recorded.key_averages()
    path.with_suffix(".operators.txt").write_text(
        averages.table(sort_by="self_cpu_time_total", row_limit=60)
    )


def nccl_seconds(parameters: list[Any], rounds: int) -> list[float]:
    """Seconds of adding all gradients with NCCL and one rank: the cost of its calls without that of a network."""
    import torch
    import torch.distributed as dist

    dist.init_process_group(
        "nccl", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1
    )
    grads = [torch.zeros_like(p) for p in parameters]
    durations = []
    for _ in range(WARMUP + rounds):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        dist.all_reduce(torch.cat([g.flatten() for g in grads]))
        torch.cuda.synchronize()
        durations.append(time.perf_counter() - begin)
    dist.destroy_process_group()
    return durations[WARMUP:]


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(options: argparse.Namespace, size: int, independent: bool = False) -> dict[str, Any]:
    """The result of the first of `size` ranks, each on cores of its own."""
    cpus, port, started = sorted(os.sched_getaffinity(0)), free_port(), []
    for rank in range(size):
        own = set(cpus[rank * options.cores : (rank + 1) * options.cores])
        variables_of_rank = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
        }
        variables_of_rank |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        if independent:
            variables_of_rank = {}
        variables_of_rank |= {"OMP_NUM_THREADS": options.cores}
        # As the command sets them: threads that wait do not spin for long.
        waiting = environment(platform.system(), os.environ) if not options.spin else {}
        variables = {**os.environ, **waiting, **{k: str(v) for k, v in variables_of_rank.items()}}
        pin = None if options.device == "cuda" else lambda own=own: os.sched_setaffinity(0, own)
        command = [sys.executable, __file__, "--worker", *sys.argv[1:]]
        options_of_process = {"env": variables, "stdout": subprocess.PIPE, "text": True}
        process = subprocess.Popen(command, preexec_fn=pin, **options_of_process)  # noqa: PLW1509  no threads
        started.append(process)
    outputs = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit(f"{size} ranks ended with {[process.returncode for process in started]}")
    results = [json.loads(output.splitlines()[-1]) for output in outputs if output.strip()]
    if options.limits:  # all together
        return {name: sum(item[name] for item in results) for name in results[0]}
    if independent:  # the mean of all, as if they were ranks
        results[0]["batch"] *= size
        results[0]["seconds"] = [
            statistics.mean(values)
            for values in zip(*(item["seconds"] for item in results), strict=True)
        ]
    result: dict[str, Any] = results[0]
    return result


def table(options: argparse.Namespace, ranks: dict[int, dict[str, Any]]) -> list[dict[str, str]]:
    """The rows for tools/results_table.py."""
    kind = "independent rank" if options.independent else "rank"
    where = "on a GPU" if options.device == "cuda" else f"on {plural(options.cores, 'core')} each"
    images = f"{options.batch_size} images {'in all' if options.total else 'per rank'}"
    work = f"`{options.model}`, {options.optimizer}{', sharded' * (options.fsdp == 'on')}, {images}"
    rows = []
    for size, figures in ranks.items():
        words = [f"{spread(figures['images_per_second'], ',.1f')} images/s"]
        words += (
            [f"efficiency **{spread(figures['efficiency'])}**"]
            if size > 1 and "efficiency" in figures
            else []
        )
        if "of_independent" in figures:
            words.append(
                f"{spread(figures['of_independent'])} of as many processes without communication"
            )
        if "efficiency_of_means" in figures and size > 1:
            words.append(f"{spread(figures['efficiency_of_means'])} by the mean step")
        if "predicted_over_measured" in figures:
            words.append(f"predicted step {spread(figures['predicted_over_measured'])} of measured")
        if "of_gloo" in figures:
            words.append(f"{spread(figures['of_gloo'])} times as fast as with gloo")
        words += (
            [f"{spread(figures['exchange_fraction'], '.0%')} of a step in exchanges"]
            if size > 1
            else []
        )
        if options.overlap and size > 1:
            words.append(
                f"{spread(figures['overlap'])} times as fast as with exchanges after the backward"
                " pass"
            )
        words += (
            [f"NCCL {1e3 * figures['nccl_seconds']['median']:.2f} ms"]
            if "nccl_seconds" in figures
            else []
        )
        # A file that is written is named without its folder: results name no path of a machine.
        words_typed = [
            Path(word).name if Path(word).is_absolute() else word
            for word in sys.argv[1:]
            if word != "--quick"
        ]
        command = " ".join(["python benchmarks/ranks.py", *words_typed]).partition(" --json")[0]
        subject, n = f"{plural(size, kind)} {where}: {work}", str(figures["images_per_second"]["n"])
        rows.append({"what": subject, "figure": ", ".join(words), "n": n, "command": command})
    return rows


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--cores", type=int, default=1, help="of each rank, on the CPU")
    parser.add_argument("--model", default="tiny", help="preset")
    parser.add_argument("--batch-size", type=int, default=32, help="images of each rank")
    parser.add_argument(
        "--total", action="store_true", help="--batch-size is that of all ranks together"
    )
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), default=DEFAULT_OPTIMIZER)
    parser.add_argument("--fsdp", choices=["on", "off"], default="off")
    parser.add_argument(
        "--overlap", action="store_true", help="every other step exchanges after the backward pass"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--independent", action="store_true", help="processes that do not communicate: the ceiling"
    )
    parser.add_argument(
        "--ceiling", action="store_true", help="alternate with processes that do not communicate"
    )
    parser.add_argument(
        "--paired", action="store_true", help="one process and all ranks in turn, n times"
    )
    parser.add_argument("--gloo", action="store_true", help="every other step exchanges by gloo")
    parser.add_argument(
        "--limits", action="store_true", help="memory and matmuls of as many processes, no steps"
    )
    parser.add_argument("--wrapped", action="store_true", help="one rank with exchange and FSDP2")
    parser.add_argument(
        "--profile", type=Path, help="with --wrapped: write where the host spends its time there"
    )
    parser.add_argument("--trace", type=Path, help="write a trace of one step of rank 0 there")
    parser.add_argument("--spin", action="store_true", help="threads wait as torch lets them")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="few small steps: a smoke test")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.batch_size, options.steps, options.rounds, options.ranks = 4, 2, 1, [1, 2]
    if options.wrapped:
        result = {
            "machine": machine(),
            "options": {**vars(options), "json": None, "profile": None},
            **wrapped(options),
        }
        for name, ratio in result["ratio"].items():
            step_ms = 1e3 * result["wrapped"][name]["median"]
            print(f"  {name}: {step_ms:.1f} ms, speed {spread(ratio, '.3f')} of no ranks, "
                  f"last loss {result['last_loss'][name]:.4f}")  # fmt: skip
        if options.json:
            write(options.json, result)
        return
    if options.worker:
        measured = limits(options) if options.limits else work(options)
        if measured is not None:
            print(json.dumps(measured), flush=True)
        return
    max_ranks = (
        len(os.sched_getaffinity(0)) // options.cores
        if options.device == "cpu"
        else max(options.ranks)
    )
    sizes = [size for size in options.ranks if size <= max_ranks]
    for size in set(options.ranks) - set(sizes):
        print(f"{size} ranks: not measured, {len(os.sched_getaffinity(0))} cores are too few")
    if options.paired:
        result = measure_paired(options, [size for size in sizes if size > 1])
        if options.json:
            write(options.json, result)
        return
    if options.limits:
        result = {"machine": machine(), "options": {"cores": options.cores}}
        result["processes"] = {size: run(options, size, independent=True) for size in sizes}
        for size, figures in result["processes"].items():
            words = ", ".join(f"{value:.1f} {name}" for name, value in figures.items())
            print(f"  {size} at once: {words}")
        if options.json:
            write(options.json, result)
        return
    rows: dict[int, list[dict[str, Any]]] = {size: [] for size in sizes}
    result: dict[str, Any] = {
        "machine": machine(),
        "quick": options.quick,
        "options": {**vars(options), "json": None, "trace": None, "profile": None},
    }
    ceilings: dict[int, list[dict[str, Any]]] = {size: [] for size in sizes if size > 1}
    for _ in range(options.rounds):
        for size in sizes:
            rows[size].append(run(options, size, options.independent))
            if options.ceiling and size > 1:
                ceilings[size].append(run(options, size, independent=True))
    speeds = {
        size: [row["batch"] / timing(row["seconds"]).median for row in group]
        for size, group in rows.items()
    }
    result["ranks"], result["parts"] = {}, {}
    for size, group in rows.items():
        efficiency = [
            own / (size * alone) for own, alone in zip(speeds[size], speeds[sizes[0]], strict=True)
        ]
        exchange = [sum(row["exchange"]) / sum(row["seconds"]) for row in group]
        figures = {"images_per_second": speeds[size], "exchange_fraction": exchange}
        figures |= {"efficiency": efficiency} if sizes[0] == 1 else {}
        if sizes[0] == 1:
            figures["efficiency_of_means"] = [
                statistics.mean(alone["seconds"])
                / statistics.mean(row["seconds"])
                * (row["batch"] / (size * alone["batch"]))
                for row, alone in zip(group, rows[1], strict=True)
            ]
        if "predicted_exchange" in group[0] and sizes[0] == 1 and not options.total:
            figures["predicted_over_measured"] = [
                (timing(alone["seconds"]).median + row["predicted_exchange"])
                / timing(row["seconds"]).median
                for row, alone in zip(group, rows[1], strict=True)
            ]
        if ceilings.get(size):
            most = [row["batch"] / timing(row["seconds"]).median for row in ceilings[size]]
            figures["independent_images_per_second"] = most
            figures["of_independent"] = [
                own / other for own, other in zip(speeds[size], most, strict=True)
            ]
        if options.gloo and size > 1 and not options.independent:
            others = [row["batch"] / timing(row["gloo"]).median for row in group]
            figures["gloo_images_per_second"] = others
            figures["of_gloo"] = [
                other / own
                for row in group
                for own, other in zip(row["seconds"], row["gloo"], strict=True)
            ]
            if sizes[0] == 1:
                figures["gloo_efficiency"] = [
                    other / (size * alone)
                    for other, alone in zip(others, speeds[sizes[0]], strict=True)
                ]
            result.setdefault("gloo_parts", {})[size] = group[0]["gloo_parts"]
        figures |= (
            {"overlap": [ratio for row in group for ratio in row["overlap"]]}
            if options.overlap
            else {}
        )
        figures |= (
            {"nccl_seconds": [s for row in group for s in row["nccl"]]}
            if "nccl" in group[0]
            else {}
        )
        result["ranks"][size] = {
            name: dataclasses.asdict(timing(values)) for name, values in figures.items()
        }
        result["parts"][size] = group[0]["parts"]
        result.setdefault("step_seconds", {})[size] = [row["seconds"] for row in group]
    result["rows"] = table(options, result["ranks"])
    facts = result["machine"]
    print(f"{facts['cuda'] or facts['cpu']}, torch {facts['torch']}, commit {facts['commit']}")
    for row in result["rows"]:
        print(f"  {row['what']}: {row['figure']}, n={row['n']}")
    for size, group in rows.items():
        if "traced_overlap" in group[-1]:
            overlap = result.setdefault("traced_overlap", {})[size] = group[-1]["traced_overlap"]
            print(f"  {size} ranks: {overlap['exchange_ms']:.0f} ms of all-reduce in a traced step, "
                  f"{overlap['fraction']:.0%} of them during the backward pass")  # fmt: skip
    for size, parts in result["parts"].items():
        words = ", ".join(f"{name} {1e3 * value:.0f}" for name, value in parts.items())
        print(f"  {size} rank(s), ms of a step: {words}")
    if options.json:
        write(options.json, result)


if __name__ == "__main__":
    main()
