"""Shared by the benchmarks: a process that answers questions, the machine's description, a figure with its spread."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from m1clip.config import TransferConfig
from m1clip.hardware.machine_info import environment, read_machine_info
from m1clip.hardware.timing import Timing, timing
from m1clip.model.presets import CLIPConfig, flops_per_pair

if TYPE_CHECKING:
    from m1clip.config import Config
    from m1clip.data.loader import Batch
    from m1clip.training.compose import TrainStep
    from m1clip.training.inputs import RunInputs

RESULTS = Path(__file__).parents[1] / "docs" / "results"
NO_PEERS = (
    "not measured: set PEERS=PYTHON, a Python with open_clip and transformers"
    " (benchmarks/README.md)"
)


class Side:
    """A long-lived process with one side of a comparison in it, which answers a line with a line of JSON."""

    def __init__(self, command: Sequence[str]) -> None:
        self.process = subprocess.Popen(
            list(command),
            env=variables_for(command[0]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, question: str | dict[str, Any]) -> Any:
        """Send a question, wait for the answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(
            (question if isinstance(question, str) else json.dumps(question)) + "\n"
        )
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith('{"answer"'):
                return json.loads(line)["answer"]
        raise SystemExit(
            f"{' '.join(map(str, self.process.args))}: ended with {self.process.wait()}"
        )  # type: ignore[arg-type]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()  # the end of its input ends it


def in_turn(
    asks: Mapping[str, Callable[[], Any]], rounds: int, warmup: int = 2
) -> list[dict[str, Any]]:
    """The answers of each round, the order reversed each time, so that a busy moment of the machine affects all."""
    turns = []
    for turn in range(-warmup, rounds):
        turns.append({name: asks[name]() for name in list(asks)[:: 1 if turn % 2 else -1]})
        print(f"  round {turn + 1} of {rounds}", file=sys.stderr)
    return turns[warmup:]


def figures(values: Iterable[float]) -> dict[str, Any]:
    """Median, quartiles and n, as JSON."""
    return dataclasses.asdict(timing(list(values)))


def variables_for(python: str) -> dict[str, str]:
    """Variables for a process of m1clip, or of a peer: PEER_SOURCE names a checkout of open_clip, its folder src/."""
    # All wait passively, as m1clip does: spinning threads would slow the others on a busy machine.
    variables = {**os.environ, **environment(platform.system(), os.environ)}
    return (
        variables
        if python == sys.executable
        else {**variables, "PYTHONPATH": os.environ.get("PEER_SOURCE", "")}
    )


def set_up(config: Config) -> RunInputs:
    """Everything that a run of this config needs, as `m1clip train` prepares it."""
    from m1clip import console
    from m1clip.training.workbench import prepare

    config = dataclasses.replace(config, transfer=TransferConfig(recipe="scratch"))
    with console.quiet():
        return prepare(config)


def training_step(job: RunInputs) -> TrainStep:
    """The product's training step."""
    from m1clip.training.compose import compose_step
    from m1clip.training.step import make_parts

    preprocess = job.model.preprocess
    parts = make_parts(job.build_model(), job.config, job.device, job.precision, preprocess)
    return compose_step(parts)


def peer_shape(config: CLIPConfig) -> dict[str, Any]:
    """The sizes of a model, as the scripts in peers/ read them."""
    vision, text = config.own_towers
    towers = {
        f"{name}_{key}": getattr(tower, key)
        for name, tower in (("vision", vision), ("text", text))
        for key in ("width", "layers", "heads")
    }
    rest = {key: getattr(vision, key) for key in ("image_size", "patch_size", "mlp_ratio")}
    rest |= {
        "embed_dim": config.embed_dim,
        "vocab_size": config.vocab_size,
        "vision_pre_norm": vision.pre_norm,
    }
    return {**towers, **rest}


def peak_memory(flags: Sequence[str], own_cache: bool = False) -> int:
    """Peak RSS of a fresh `m1clip train` on the CPU: set-up, steps, evaluation, checkpoint and final report."""
    variables = variables_for(sys.executable)
    with (
        tempfile.TemporaryDirectory() as folder,
        (Path(folder) / "output.txt").open("w+") as output,
    ):
        variables |= {"XDG_CACHE_HOME": f"{folder}/cache"} if own_cache else {}
        command = [
            sys.executable,
            "-m",
            "m1clip",
            "train",
            *flags,
            "--device",
            "cpu",
            "--out",
            f"{folder}/run",
        ]
        process = subprocess.Popen(command, stdout=output, stderr=output, env=variables)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            output.seek(0)
            raise SystemExit(
                f"{' '.join(command)} ended with {process.returncode}:\n{output.read()}"
            )
    return used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def machine() -> dict[str, Any]:
    """Where and with what a benchmark was measured."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    git = subprocess.run(command, capture_output=True, text=True, check=False)
    facts = read_machine_info()
    # Before any side starts: what else ran.
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {
        "cpu": facts.cpu,
        "cores": facts.cores,
        "system": facts.system,
        "torch": facts.torch,
        "cuda": facts.cuda,
        "python": facts.python,
        # A copy of the tree without its history is named by who made it.
        "commit": git.stdout.strip() or os.environ.get("COMMIT", "unknown"),
        "load_before": load,
    }


def step_flops(shape: CLIPConfig, batch: Batch) -> float:
    """Forward and backward of a batch as it is computed: images once, captions in groups of like length."""
    # The caption's two vectors, which are little, are counted with the image.
    images = flops_per_pair(shape, 0)
    texts = sum(
        len(group) * (flops_per_pair(shape, group.shape[1]) - images)
        for group in map(batch.texts, batch.text_rows())
    )
    return len(batch) * images + texts


def spread(values: dict[str, Any] | Timing, form: str = ".2f", unit: str = "") -> str:
    """`2.57 s [2.51, 2.63]`: the median with its quartiles."""
    t = values if isinstance(values, Timing) else Timing(**values)
    return f"{t.median:{form}}{unit} [{t.low:{form}}, {t.high:{form}}]"


def write(path: Path, result: dict[str, Any]) -> None:
    """Keep a result as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
