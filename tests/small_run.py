"""A small but real run: 32 px synthetic images, two towers of width 32."""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file
from torch import Tensor

from m1clip import console
from m1clip.config import NAMES, Config, from_dict
from m1clip.data.loader import Batch
from m1clip.runlog import read_log
from m1clip.training.compose import Step, TrainStep
from m1clip.training.inputs import RunInputs
from m1clip.training.run import Run, resume, train_config
from m1clip.training.step import StepResult
from m1clip.training.workbench import prepare

TIMEOUT = 300.0  # seconds for what takes few; only a test that fails waits so long
ROOT = str(Path(__file__).parent.parent)  # started processes run this tree too
# Processes are forked from a server that has already imported torch: they start in milliseconds.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    [
        "m1clip.cli.main",
        "m1clip.training.run",
        "m1clip.data.synthetic.source",
        "pytest",
        "freeze_imports",
    ]
)

SMALL: dict[str, Any] = {
    "transfer.recipe": "scratch",
    "model.image_size": 32,
    "model.patch_size": 8,
    "model.vision_width": 32,
    "model.vision_layers": 2,
    "model.text_width": 32,
    "model.text_layers": 2,
    "model.embed_dim": 32,
    "data.synthetic_images": 72,  # four batches of 16, and 8 left over; 8 each for validation and test
    "data.captions_per_step": 2,
    "train.batch_size": 16,
    "train.steps": 10,
    "train.eval_every": 0,
    "train.device": "cpu",
    "train.precision": "fp32",
    "train.threads": 1,
}


def small_config(changes: dict[str, Any] | None = None) -> Config:
    """The small run with changes by dotted name; None removes a setting."""
    nested: dict[str, Any] = {}
    for name, value in _small(changes).items():
        section, _, key = name.rpartition(".")
        if value is not None:
            (nested.setdefault(section, {}) if section else nested)[key] = value
    return from_dict(nested, "small run")


def small_arguments(changes: dict[str, Any] | None = None) -> list[str]:
    """`small_config` as command-line arguments."""
    words = []
    for name, value in small_options(changes).items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    return words


def small_options(changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """`small_config` as flat options of `m1clip.train`."""
    flat = {".".join(path): name for name, path in NAMES.items() if path[0]}
    return {
        flat.get(name, name): value for name, value in _small(changes).items() if value is not None
    }


def _small(changes: dict[str, Any] | None) -> dict[str, Any]:
    recipe = {"transfer.recipe": "finetune"} if changes and "transfer.init" in changes else {}
    return {**SMALL, **recipe, **(changes or {})}


def prepared(config: Config) -> RunInputs:
    with console.quiet():
        return prepare(config)


def run_small(folder: Path, changes: dict[str, Any] | None = None) -> Run:
    with console.quiet():
        return train_config(small_config(changes), folder)


def finished_run(changes: dict[str, Any] | None = None) -> Path:
    """A finished run that all tests and xdist workers share: do not write to it."""
    key = hashlib.sha256(json.dumps(changes or {}, sort_keys=True).encode()).hexdigest()[:16]
    return made_once(f"run-{key}", lambda folder: run_small(folder, changes))


def made_once(name: str, make: Callable[[Path], object]) -> Path:
    """A folder that the first test to need it makes, and that all tests and xdist workers share."""
    folder = Path(os.environ["M1CLIP_TEST_CACHE"]) / "shared" / name
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        if not (folder / "finished").exists():
            shutil.rmtree(folder / "made", ignore_errors=True)  # of a test that was stopped
            make(folder / "made")
            (folder / "finished").touch()
    return folder / "made"


def resume_quietly(folder: Path) -> tuple[Run, str]:
    """Resume a run; returns it and its output."""
    with console.capture() as output:
        result = resume(folder)
    return result, output.getvalue()


def losses_of(run: Path) -> list[float]:
    return [record["loss"] for record in read_log(run) if record["kind"] == "step"]


def tensors_of(run: Path, step: int) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint: weights, optimizer state, average."""
    folder = run / "checkpoints" / f"step-{step:06d}"
    files = sorted(folder.glob("*.safetensors"))
    assert files, f"no checkpoint of step {step}"
    return {f"{file.stem}:{name}": t for file in files for name, t in load_file(file).items()}


def assert_same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Equal names, equal dtypes, equal bits."""
    assert one.keys() == other.keys()
    different = [
        n for n in one if one[n].dtype != other[n].dtype or not torch.equal(one[n], other[n])
    ]
    assert not different


def assert_same_batch(one: Batch, other: Batch) -> None:
    """Equal tensors, lengths and failures."""
    assert (one.lengths, one.failed) == (other.lengths, other.failed)
    assert one.tensors().keys() == other.tensors().keys() >= {"images", "tokens", "views"}
    for name, tensor in one.tensors().items():
        assert torch.equal(tensor, other.tensors()[name]), name


def weights_sha256(run: Path, model: str = "model") -> str:
    return hashlib.sha256((run / model / "model.safetensors").read_bytes()).hexdigest()


class Command:
    """`m1clip WORDS` in a separate process and process group, or `script WORDS`.

    `prepare` runs in it first (a module-level function).
    """

    started: ClassVar[list[Command]] = []  # killed after each test by conftest.py

    def __init__(
        self,
        *words: str,
        cwd: Path,
        prepare: Callable[[], object] | None = None,
        script: Path | None = None,
    ) -> None:
        self.output = Path(tempfile.mkdtemp(prefix="output-", dir=cwd.parent))
        for name in ("stdout", "stderr"):
            (self.output / name).touch()
        self.process = SERVER.Process(target=_main, args=(words, cwd, self.output, prepare, script))
        self.process.start()
        self.pid: int = self.process.pid  # type: ignore[assignment]
        self.started.append(self)

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def send_signal(self, number: int, group: bool = False) -> None:
        if self.process.is_alive():
            with contextlib.suppress(ProcessLookupError):  # it ended just now
                (os.killpg if group else os.kill)(self.pid, number)

    def wait(self, timeout: float = TIMEOUT) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.send_signal(signal.SIGKILL, group=True)
            raise AssertionError(f"not finished after {timeout} s: {self.read()}")
        return self.process.exitcode

    def wait_until(self, condition: Callable[[], Any], timeout: float = TIMEOUT) -> None:
        """Wait until a condition holds; fails if the process ends without it."""
        deadline = time.monotonic() + timeout
        while True:
            alive = self.process.is_alive()  # asked first: the condition may be its last act
            if condition():
                return
            assert alive, (self.process.exitcode, self.read())
            assert time.monotonic() < deadline, self.read()
            time.sleep(0.005)

    def read(self) -> tuple[str, str]:
        """What it has printed to stdout and stderr."""
        return (self.output / "stdout").read_text(), (self.output / "stderr").read_text()


def _main(
    words: tuple[str, ...],
    cwd: Path,
    output: Path,
    prepare: Callable[[], object] | None,
    script: Path | None,
) -> None:
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which `nohup make test` ignores
    os.chdir(cwd)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(output / name, os.O_WRONLY | os.O_APPEND), number)
    os.environ.update(environment())
    sys.argv = ["m1clip", *words]
    if prepare:
        prepare()
    if script is not None:
        sys.argv[0] = str(script)
        sys.path.insert(0, str(script.parent))
        runpy.run_path(str(script), run_name="__main__")
        return
    from m1clip.cli.main import main

    main()


def _set_environment(variables: dict[str, str]) -> None:
    os.environ.update(variables)


def hold_at(step: int, file: Path) -> None:
    """In the training process: wait before a step until the file exists, so that a test can act in between."""

    def wait(_step: TrainStep, _batch: Batch, number: int) -> None:
        while number == step and not file.exists():
            time.sleep(0.005)

    before_each_step(wait)


def before_each_step(
    action: Callable[[TrainStep, Batch, int], object], patch: pytest.MonkeyPatch | None = None
) -> None:
    """Call an action with (train_step, batch, step) before every training step of this process.

    The one place where tests replace the step: `patch` undoes it after the test; without it, it
    stays. A step that is repeated because memory ran out is one step.
    """
    earlier = TrainStep.__dict__.get("attempt")  # of another call of this function
    newest: list[Batch] = []

    def plain(train_step: TrainStep) -> Step:
        step: Step = train_step.__dict__["attempt"] if earlier is None else earlier.fget(train_step)
        return step

    def attempt(train_step: TrainStep) -> Step:
        def act_and_train(batch: Batch, step: int, *rest: Any) -> StepResult:
            is_repeated = bool(newest) and newest[0] is batch
            newest[:] = [batch]
            if not is_repeated:
                action(train_step, batch, step)
            return plain(train_step)(batch, step, *rest)

        return act_and_train

    def store(train_step: TrainStep, step: Step) -> None:
        train_step.__dict__["attempt"] = step

    # What compose_step has put together, with or without a CUDA graph, in torch or in MLX.
    replacement = property(attempt, store)
    if patch is None:
        TrainStep.attempt = replacement  # type: ignore[assignment, method-assign]
    else:
        patch.setattr(TrainStep, "attempt", replacement, raising=False)


def exit_code(*words: str | Path) -> int:
    """`m1clip WORDS` in this process."""
    from m1clip.cli.main import main

    with pytest.raises(SystemExit) as ended:
        main(list(map(str, words)))
    return int(ended.value.code or 0)


def command(
    *words: str, cwd: Path, timeout: float = TIMEOUT, script: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run `m1clip WORDS`, or a script, to its end, with these environment variables."""
    prepare = partial(_set_environment, variables)
    process = Command(*words, cwd=cwd, prepare=prepare, script=script)
    code = process.wait(timeout)
    return subprocess.CompletedProcess(words, code, *process.read())


def environment() -> dict[str, str]:
    """Environment of a process: 200 columns, no terminal, no colors."""
    return {
        **os.environ,
        "COLUMNS": "200",
        "LINES": "60",
        "NO_COLOR": "1",
        "TERM": "dumb",
        "PYTHONPATH": ROOT,
    }


def figures_of(results: Sequence[StepResult]) -> Tensor:
    """(steps, 4) loss, gradient norm, accuracy within the batch and its chance level."""
    return torch.stack(
        [torch.stack([result.loss, result.grad_norm, *result.batch_accuracy]) for result in results]
    )
