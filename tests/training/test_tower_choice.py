"""Which towers `auto` takes."""

import pytest
from machines import H200, XEON

from m1clip.model.pretrained.packages import tower_parts
from m1clip.training.tower_choice import (
    BASE_IMAGE,
    BASE_TEXT,
    GPU_CORES,
    TowerChoice,
    base_of,
    choose_towers,
    cores_worth,
)

BOTH = ("dinov2-small", "gte-small")


def choose(
    downloaded: tuple[str, ...],
    images: int = 6_000,
    minutes: float | None = None,
    requested: tuple[str, str] = ("auto", "auto"),
    speed: float = 2.0,
) -> TowerChoice:
    return choose_towers(requested, images, 5, minutes, speed, lambda name: name in downloaded)


@pytest.mark.parametrize(
    ("downloaded", "image", "text", "reason"),
    [
        ((), "", "", "m1clip download dinov2-small and m1clip download gte-small would give"),
        (BOTH, "+dinov2-small", "+gte-small", "dinov2-small and gte-small on this computer"),
        (BOTH[:1], "+dinov2-small", "", "about 2 minutes more for 6,000 images"),
        (BOTH[1:], "", "+gte-small", "gte-small on this computer"),
    ],
)
def test_auto_takes_the_towers_that_are_here(
    downloaded: tuple[str, ...], image: str, text: str, reason: str
) -> None:
    towers = choose(downloaded)
    assert (towers.image, towers.text) == (BASE_IMAGE + image, BASE_TEXT + text)
    assert reason in towers.reason
    assert "dinov2-small" not in image or "dinov2-small" in tower_parts(towers.image)


def test_few_images_keep_the_towers_of_the_model_general() -> None:
    towers = choose(BOTH, images=999)
    assert (towers.image, towers.text) == (BASE_IMAGE, BASE_TEXT)
    assert "999 images, heads may start from the model general" in towers.reason


def test_better_towers_take_less_than_half_of_the_time() -> None:
    assert choose(BOTH, minutes=2).image == BASE_IMAGE
    assert "would take about 3 minutes more" in choose(BOTH, minutes=2).reason
    assert choose(BOTH, minutes=10).image != BASE_IMAGE
    assert choose(BOTH, minutes=2, speed=GPU_CORES).image != BASE_IMAGE


def test_what_the_user_chose_stays() -> None:
    towers = choose(BOTH, requested=("efficientnet-lite0", "auto"))
    assert (towers.image, towers.text) == ("efficientnet-lite0", f"{BASE_TEXT}+gte-small")
    assert "dinov2" not in towers.reason
    assert base_of("a/vit") == "a/vit"


def test_a_gpu_is_worth_many_cores_and_a_cpu_without_bf16_few() -> None:
    assert cores_worth("auto", H200, 0) == GPU_CORES
    assert cores_worth("cpu", H200, 0) < GPU_CORES
    assert cores_worth("cpu", XEON, 3) == pytest.approx(1)
