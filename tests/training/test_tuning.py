"""What is trained of a model to start from: a pure rule of images, time, memory and speed."""

import pytest

from m1clip.model.presets import preset
from m1clip.optimizers import OPTIMIZERS
from m1clip.training.tuning import (
    ENOUGH_FOR_CONVOLUTIONS,
    ENOUGH_FOR_TOWERS,
    ModelSize,
    choose_tuning,
    model_size,
)

VIT_B_16 = ModelSize(150_000_000, 1.2e11, True)
TOWERS = ModelSize(31_000_000, 8e9, False)
FAST, SLOW = 2e13, 6e10
TRAINED_BYTES = OPTIMIZERS["adamw"].trained_bytes


@pytest.mark.parametrize(
    ("images", "minutes", "memory", "speed", "size", "trained_part", "reason"),
    [
        (50, None, 64e9, FAST, VIT_B_16, "heads", "50 images are too few"),
        (ENOUGH_FOR_TOWERS, None, 64e9, SLOW, VIT_B_16, "heads", "more than 30 minutes"),
        (ENOUGH_FOR_TOWERS, 1, 64e9, SLOW, VIT_B_16, "heads", "more than --minutes 1"),
        (ENOUGH_FOR_TOWERS, None, 64e9, FAST, VIT_B_16, "all blocks", "are enough"),
        (ENOUGH_FOR_TOWERS, None, 4e9, FAST, VIT_B_16, "LoRA of rank 8", "all blocks need"),
        (ENOUGH_FOR_TOWERS, None, 2e9, FAST, VIT_B_16, "heads", "more than 2.0 GB"),
        (ENOUGH_FOR_TOWERS, None, 8e9, FAST, TOWERS, "the text tower", "are enough"),
        (ENOUGH_FOR_CONVOLUTIONS, None, 8e9, FAST, TOWERS, "all blocks", "are enough"),
        (ENOUGH_FOR_CONVOLUTIONS, None, 1.6e9, FAST, TOWERS, "heads", "more than 1.6 GB"),
    ],
)
def test_choice(
    images: int,
    minutes: float | None,
    memory: float,
    speed: float,
    size: ModelSize,
    trained_part: str,
    reason: str,
) -> None:
    choice = choose_tuning(images, minutes, memory, speed, size, TRAINED_BYTES)
    assert choice.trained_part.startswith(trained_part)
    assert reason in choice.reason
    assert (choice.recipe == "frozen") == (trained_part == "heads")


def test_lora_is_a_setting_of_the_run() -> None:
    choice = choose_tuning(ENOUGH_FOR_TOWERS, None, 4e9, FAST, VIT_B_16, TRAINED_BYTES)
    assert choice.settings == {"lora": 8}


def test_size_of_a_model() -> None:
    size = model_size(preset("ViT-B-16"), 150_000_000)
    assert size.has_linear_layers
    assert 5e10 < size.flops_per_image < 3e11


def test_optimizer_with_fewer_moments_trains_more_in_the_same_memory() -> None:
    images, memory = ENOUGH_FOR_TOWERS, 4e9
    with_two = choose_tuning(images, None, memory, FAST, VIT_B_16, TRAINED_BYTES)
    with_none = choose_tuning(images, None, memory, FAST, VIT_B_16, 4)
    assert (with_two.settings, with_none.settings) == ({"lora": 8}, {})
    assert with_none.recipe == "finetune"
