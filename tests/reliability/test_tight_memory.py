"""Promise 8: a process that comes near its memory limit, or is refused memory, trains on to the same weights."""

from __future__ import annotations

import importlib
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from small_run import Command, before_each_step, environment, small_arguments, tensors_of

from m1clip.hardware.memory import NEAR_LIMIT, return_freed_memory
from m1clip.losses.registry import LOSSES
from m1clip.runlog import read_log
from m1clip.training.compose import TrainStep
from m1clip.training.oom import OOMHandler

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux limits the memory of a process"
)
BATCH, STEPS = 128, 6
# Relative, of each weight: a smaller micro-batch adds the same numbers in another order.
TOLERANCE = 1e-4
# Most of the memory of this model are the activations of a micro-batch.
CHANGES = {
    "model.patch_size": 4,
    "model.vision_width": 64,
    "data.synthetic_images": 160,
    "train.batch_size": BATCH,
    "train.steps": STEPS,
    "optim.optimizer": "adamw",
}
THIRD, FIFTH = 2, 4
# Bytes more than what counts as near; half a micro-batch frees several times as much.
ABOVE = 16 * 2**20
GRANTED = 0.2  # of what a step has used: too little for a complete batch


def take_memory(how: str) -> None:
    """In the training process: "near" holds memory in the third and fourth step until more than --memory is in use;
    with "refused", the system grants less than the steps before have used."""
    # The first `tensor.backward(gradient)` imports it, which could fail when memory is short.
    importlib.import_module("torch.fx.experimental.symbolic_shapes")
    state: dict[str, Any] = {"used": 0, "begin": 0, "wanted": {}, "step": 0, "held": None}
    original_check = OOMHandler.check

    def limit_memory(update: TrainStep, batch: Any, number: int) -> None:
        return_freed_memory()  # or a run near its limit would find enough of it to go on
        state["begin"], state["step"] = address_space(), number
        if number == THIRD and how == "near":
            missing = int(NEAR_LIMIT * update.attempts.handler.limit) - state["used"] + ABOVE
            assert 0 < missing < 2**31, (
                "memory was already near the limit, or no --memory was given"
            )
            # Written to, so that the system really assigns it.
            state["held"] = np.ones(missing, np.uint8)
        if number == THIRD and how == "refused":
            limit = state["begin"] + int(GRANTED * min(state["wanted"].values()))
            resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        if number == FIFTH:
            state["held"] = None
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    def check(handler: OOMHandler) -> None:
        state["used"] = max(state["used"], handler.used_bytes())
        state["wanted"][state["step"]] = address_space() - state["begin"]
        original_check(handler)

    before_each_step(limit_memory)
    OOMHandler.check = check
    if how == "refused":
        # Its error would be "could not create a primitive".
        torch.backends.mkldnn.set_flags(_enabled=False)


def address_space() -> int:
    return int(psutil.Process().memory_info().vms)


def train(folder: Path, how: str, changes: dict[str, Any]) -> Path:
    """Train in a new process that runs short of memory in this way, or has enough ("reference")."""
    options = [*small_arguments({**CHANGES, **changes}), "--out", how]
    if how == "reference":
        process = Command("train", *options, cwd=folder)
        assert process.wait() == 0, process.read()
        return folder / how
    code = (
        f"import test_tight_memory; test_tight_memory.take_memory({how!r}); from m1clip.cli.main"
        " import main; main()"
    )
    words = [sys.executable, "-c", code, "train", *options]
    # glibc then returns each freed tensor at once, so that the address space is what is in use.
    env = {
        **environment(),
        "MALLOC_MMAP_THRESHOLD_": "131072",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    ended = subprocess.run(
        words, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, (ended.stdout, ended.stderr)
    return folder / how


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in read_log(run) if line["kind"] == "step"]


def compare(run: Path, reference: Path, why: str) -> tuple[int, float]:
    """It was reported, the batch and the weights stayed the same.

    Returns the halvings and the largest difference.
    """
    reported = [line for line in read_log(run) if line.get("event") == "low memory"]
    assert reported, "memory never ran low: the test is void"
    assert [line["micro_batch"] for line in reported] == [
        BATCH // 2 ** (n + 1) for n in range(len(reported))
    ]
    assert all(
        line["batch"] == BATCH and line["helps"] and why in line["reason"] for line in reported
    )
    assert reported[0]["step"] in (3, 4), "memory is freed first, which may be enough for one step"
    assert not [line for line in read_log(reference) if line.get("event") == "low memory"]
    assert losses(run) == pytest.approx(losses(reference), rel=TOLERANCE)
    actual, expected = tensors_of(run, STEPS), tensors_of(reference, STEPS)
    names = [
        name
        for name in expected
        if name.startswith("weights:") and expected[name].is_floating_point()
    ]
    assert len(names) > 20
    differences = [
        float((actual[name] - expected[name]).norm() / expected[name].norm().clamp_min(1e-6))
        for name in names
    ]
    assert max(differences) < TOLERANCE
    return len(reported), max(differences)


@pytest.mark.slow
def test_run_that_is_refused_memory_ends_with_the_same_weights(tmp_path: Path) -> None:
    compare(
        train(tmp_path, "refused", {}), train(tmp_path, "reference", {}), "can't allocate memory"
    )


@pytest.mark.long("Out of memory")
@pytest.mark.parametrize(
    "changes",
    [
        *({"train.loss": name} for name in LOSSES),
        {"data.crop_min": 0.5, "data.flip": 0.5, "data.color_jitter": 0.3},
        {"data.workers": 2, "seed": 7},
    ],
)
def test_runs_short_of_memory_end_with_the_same_weights(
    tmp_path: Path, changes: dict[str, Any], counts: dict[str, float]
) -> None:
    reference = train(tmp_path, "reference", changes)
    near = compare(
        train(tmp_path, "near", {**changes, "train.memory": "1.6GB"}),
        reference,
        "close to the limit",
    )
    refused = compare(train(tmp_path, "refused", changes), reference, "can't allocate memory")
    counts |= {"runs out of memory": 2, "halvings of the micro-batch": near[0] + refused[0]}
    counts["largest relative difference of weights"] = max(near[1], refused[1])
