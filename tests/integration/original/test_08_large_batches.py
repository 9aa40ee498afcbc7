"""8: micro-batches and gradient checkpointing give the loss of the complete batch in less memory."""

from typing import Any

import pytest
from small_run import finished_run, losses_of, small_config

from m1clip.hardware.device import Device
from m1clip.hardware.machine_info import read_machine_info
from m1clip.model.presets import clip_config
from m1clip.training.memory import MemoryEstimate
from m1clip.training.transfer import ModelInit

SHORT = {"train.steps": 3}


@pytest.mark.parametrize("change", [{"train.micro_batch": 4}, {"model.grad_checkpointing": True}])
def test_losses_are_those_of_the_complete_batch(change: dict[str, Any]) -> None:
    complete = losses_of(finished_run(SHORT))
    assert losses_of(finished_run({**SHORT, **change})) == pytest.approx(complete, rel=1e-4)
    assert losses_of(finished_run({**SHORT, "seed": 1})) != pytest.approx(complete, rel=1e-4)


def test_batch_size_follows_the_memory() -> None:
    one_block = {"model.vision_layers": 1, "model.text_layers": 1, "optim.optimizer": "adamw"}
    config = small_config(one_block)
    facts = read_machine_info()
    shape = clip_config(config.model)
    estimate = MemoryEstimate(config, ModelInit(shape), facts, Device("cpu", facts), "fp32", 16)
    assert estimate.step_bytes(256, False) > estimate.step_bytes(64, False)
    assert estimate.step_bytes(256, True) < estimate.step_bytes(256, False)
    batch_sizes = [estimate.largest(estimate.peak(batch, False), 512, False) for batch in (64, 256)]
    assert batch_sizes == [64, 256]
