"""Item 12: the image tower on one device, the text tower on another, at the same time."""

from typing import Any

import pytest
import torch
from small_run import figures_of, prepared, small_config

from m1clip.bench.compare import CompareOptions, configurations
from m1clip.errors import UserError
from m1clip.hardware.device import Device, choose_device
from m1clip.hardware.machine_info import read_machine_info
from m1clip.training.hybrid import HybridEncoder


def results_of(device: str, seed: int) -> list[Any]:
    inputs = prepared(small_config({"train.device": device, "seed": seed}))
    step = inputs.make_step()
    assert isinstance(step.parts.encoder, HybridEncoder) == ("+" in device)
    return [step.run(inputs.training[number], number) for number in range(2)]


def test_hybrid_trains_like_one_device_and_is_a_configuration_of_compare() -> None:
    one_device = figures_of(results_of("cpu", 0))
    two_devices = figures_of(results_of("cpu+cpu", 0))
    assert torch.equal(one_device, two_devices)
    other_seed = figures_of(results_of("cpu+cpu", 1))
    assert not torch.equal(two_devices, other_seed), "measured, not typed in"

    facts = read_machine_info()
    options = CompareOptions(batch_sizes=(2,), devices=("cpu", "cpu+cpu"), precisions=("fp32",))
    listed = configurations(facts, options, ["cpu", "cpu+cpu"])
    assert {"cpu fp32", "cpu+cpu fp32"} <= {c.variant for c in listed}
    assert not any(c.compile for c in listed if c.device == "cpu+cpu")
    assert Device("cpu+cpu", facts).is_hybrid
    with pytest.raises(UserError, match="not available on this machine"):
        choose_device("mps+cpu" if not facts.mps else "cuda+cpu", facts)
