"""The initial model that is built while images are decoded."""

import dataclasses

import pytest
import torch

from m1clip.config import Config
from m1clip.hardware.device import Device
from m1clip.hardware.machine_info import read_machine_info
from m1clip.model.presets import preset, with_fields
from m1clip.training import ahead
from m1clip.training.inputs import seeded_build
from m1clip.training.transfer import ModelInit

SHAPE = with_fields(
    preset("tiny"), image_size=32, vision_layers=1, text_layers=1, vision_width=32, text_width=32
)


@pytest.mark.parametrize("members", [1, 2])
def test_model_built_ahead_is_the_initial_model(
    members: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights do not depend on the step that loads the kernels; fitted filters are set."""
    monkeypatch.setattr(ahead, "LOADING_IMAGES", 2)
    device = Device("cpu", read_machine_info())
    shape = dataclasses.replace(SHAPE, members=members)
    early = ahead.ModelAhead(ModelInit(shape), Config(seed=7), device, "fp32", 8, True)
    draw = torch.Generator().manual_seed(0)
    fitted = ModelInit(shape, stem_filters=torch.randn(4, 3, 3, 3, generator=draw))
    model = early.model_for(fitted)
    assert model is not None
    expected = seeded_build(fitted, 7)
    for (name, own), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(own, other), name
        assert own.grad is None
    other_model = dataclasses.replace(fitted, lora=2)
    assert early.model_for(other_model) is None
