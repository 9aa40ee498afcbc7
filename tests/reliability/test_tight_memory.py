"""Promise 8, for real: a process that comes near its limit, or is refused memory, trains on to the same weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from real_process import environment
from reliability_results import recorded
from small_run import small_arguments, tensors_of

from m1clip.runlog import read_log

SCRIPT = Path(__file__).with_name("tight_train.py")
BATCH, STEPS = 128, 6
LIMIT = "1.6GB"
# glibc then gives each freed tensor back at once, so that what the system has given is what is in use.
MAPPED = {"MALLOC_MMAP_THRESHOLD_": "131072"}
# Chunks add the same numbers in another order: relative difference of each weight after these steps.
TOLERANCE = 1e-4
# Most of the memory of this model are the activations of a chunk.
CHANGES = {"model.patch_size": 4, "model.vision_width": 64, "data.train_count": 160, "train.batch_size": BATCH,
           "train.steps": STEPS, "optim.optimizer": "adamw"}  # fmt: skip
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the memory of a process")


def trained(folder: Path, how: str, changes: dict[str, Any]) -> Path:
    """Train in a process of its own that gets short of memory in this way; gives the folder of the run."""
    words = small_arguments({**CHANGES, **changes})
    surroundings = environment() | (MAPPED if how == "fail" else {})
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), how, "train", *words, "--run", how],
        cwd=folder, env=surroundings, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, (how, ended.stdout, ended.stderr)
    said = f"the batch of {BATCH} and its gradient stay the same" in " ".join(ended.stdout.split())
    assert said == (how != "plain"), ended.stdout
    return folder / how


def largest_difference(one: Path, other: Path) -> float:
    """Of all weights of two runs, relative to the weight."""
    found, wanted = tensors_of(one, STEPS), tensors_of(other, STEPS)
    names = [name for name in wanted if name.startswith("weights:") and wanted[name].is_floating_point()]
    assert len(names) > 20
    return max(float((found[name] - wanted[name]).norm() / wanted[name].norm().clamp_min(1e-6)) for name in names)


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in read_log(run) if line["kind"] == "step"]


def check(run: Path, plain: Path, why: str) -> tuple[int, float]:
    """It was told of, the batch stayed, the weights are the same; gives the halvings and the largest difference."""
    told = [line for line in read_log(run) if line.get("event") == "memory short"]
    assert told, "it was never short of memory: this run shows nothing"
    assert [line["micro_batch"] for line in told] == [BATCH // 2 ** (n + 1) for n in range(len(told))]
    assert all(line["batch"] == BATCH and line["helps"] for line in told)
    assert told[0]["step"] in (3, 4), "memory is first cleared, and that may do for one step"
    assert all(why in line["why"] for line in told)
    assert not [line for line in read_log(plain) if line.get("event") == "memory short"]
    assert losses(run) == pytest.approx(losses(plain), rel=TOLERANCE)
    assert len(losses(run)) == STEPS
    difference = largest_difference(run, plain)
    assert difference < TOLERANCE
    return len(told), difference


def squeezed(folder: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """A run with all the memory it wants, one near its limit, one that is refused memory; gives the counts."""
    plain = trained(folder, "plain", changes)
    near = check(trained(folder, "near", {**changes, "train.memory": LIMIT}), plain, "close to the limit")
    fail = check(trained(folder, "fail", changes), plain, "can't allocate memory")
    return {
        "runs": 2,
        "halvings": near[0] + fail[0],
        "halvings near a limit": near[0],
        "halvings after a failed allocation": fail[0],
        "largest relative difference": max(near[1], fail[1]),
    }


@pytest.mark.slow
def test_a_run_short_of_memory_ends_with_the_same_weights(tmp_path: Path) -> None:
    squeezed(tmp_path, {})


OTHERS: tuple[dict[str, Any], ...] = (
    {},
    {"train.loss": "multi"},
    {"train.loss": "sigmoid"},
    {"train.label_smoothing": 0.1, "seed": 5},
    {"optim.ema": 0.9, "data.crop_min": 0.5, "data.flip": 0.5, "data.color_jitter": 0.3},
    {"data.workers": 2, "seed": 7},
)


@pytest.mark.long
@pytest.mark.parametrize("part", range(1, len(OTHERS) + 1))
def test_many_runs_short_of_memory(tmp_path: Path, part: int) -> None:
    with recorded("out of memory, CPU", part, len(OTHERS)) as counts:
        counts.update(squeezed(tmp_path, OTHERS[part - 1]))
