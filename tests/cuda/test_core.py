"""The training core on a CUDA device: two devices in one step, memory by component, stages beside a captured graph."""

from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import prepared, run_small, small_config

from m1clip.hardware import timing
from m1clip.runlog import read_log
from m1clip.training.parity import flat_gradient, relative_difference
from m1clip.training.step import compute_gradients

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
MEDIUM: dict[str, Any] = {
    "train.device": "cuda",
    "model.image_size": 64,
    "model.vision_width": 512,
    "model.vision_layers": 6,
    "model.text_width": 256,
    "model.text_layers": 4,
    "data.synthetic_images": 160,
    "train.batch_size": 64,
}
MAX_REST = 0.2  # of the peak that no component explains


def records(run: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in read_log(run) if record["kind"] == kind]


@needs_cuda
@pytest.mark.parametrize("changes", [{}, {"train.micro_batch": 5}])
def test_cuda_and_cpu_together_give_the_gradient_of_the_cpu(changes: dict[str, Any]) -> None:
    results = []
    for device in ("cpu", "cuda+cpu"):
        inputs = prepared(small_config({**changes, "train.device": device}))
        step = inputs.make_step()
        loss = compute_gradients(step.parts, inputs.training[0], 0)
        results.append((loss.cpu(), flat_gradient(step.model)))
    (loss, gradient), (same_loss, same_gradient) = results
    torch.testing.assert_close(same_loss, loss, rtol=1e-4, atol=0)
    assert relative_difference(same_gradient, gradient) < 1e-3


@needs_cuda
def test_components_explain_the_peak_of_the_allocator(tmp_path: Path) -> None:
    torch.cuda.empty_cache()
    run_small(tmp_path, {**MEDIUM, "model.cuda_graph": False})
    last = records(tmp_path, "memory")[-1]
    states = last["weights"] + last["gradients"] + last["optimizer"]
    assert 0 < states < last["peak"]
    assert last["activations"] > 0
    assert last["rest"] <= MAX_REST * last["peak"], last
    assert last["peak"] <= torch.cuda.max_memory_reserved()


@needs_cuda
def test_components_of_a_small_model_name_workspaces_and_the_graph(tmp_path: Path) -> None:
    torch.cuda.empty_cache()
    run_small(tmp_path, {"train.device": "cuda", "optim.optimizer": "adamw"})
    last = records(tmp_path, "memory")[-1]
    assert last["workspaces"] > 0
    assert last["graph"] > 0
    assert last["rest"] <= MAX_REST * last["peak"], last


@needs_cuda
def test_captured_steps_have_stages_from_synchronized_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "ASSUMED_SECONDS", 0.0)  # for a run of a few seconds
    run_small(tmp_path, {**MEDIUM, "train.steps": 300, "optim.optimizer": "adamw"})
    assert not [r for r in records(tmp_path, "event") if r["event"] == "CUDA graph disabled"]
    staged = [record for record in records(tmp_path, "step") if "stages" in record]
    assert staged
    assert {"copy", "forward", "backward", "optimizer"} <= set(staged[-1]["stages"])
    assert 0 <= staged[-1]["stages_cost"] < 1
