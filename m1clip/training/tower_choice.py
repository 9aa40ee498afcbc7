"""Which pretrained towers `auto` takes: those in packages, and better ones that were downloaded.

A pure function of the data, the time and the machine. Speeds are rough: CPU time of one core of an
AMD EPYC with bf16 instructions, beside other programs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from m1clip.formatting import plural
from m1clip.hardware.device import choose_device, default_precision
from m1clip.hardware.machine_info import MachineInfo

AUTO = "auto"
BASE_IMAGE = "efficientnet-lite0+lite2"
BASE_TEXT = "minilm"
BETTER_IMAGE = "dinov2-small"  # beside the base
BETTER_TEXT = "gte-small"
# With fewer images, heads may start from those of the model general, which has the base towers.
BETTER_FROM_IMAGES = 1_000
CORE_IMAGES_PER_SECOND = 20.0  # that DINOv2-S encodes, on a core with bf16 instructions
CORE_TEXTS_PER_SECOND = 500.0  # that gte-small encodes
GPU_CORES = 100  # as many cores as a GPU is at least worth
FLOAT32_FACTOR = 3.0  # longer without bf16 instructions
TIME_FRACTION = 0.4  # of --minutes that the better towers may take


class TowerChoice(NamedTuple):
    """The towers, and why."""

    image: str
    text: str
    reason: str


def base_of(tower: str, usual: str = BASE_IMAGE) -> str:
    """A tower, or for `auto` what it takes at least."""
    return usual if tower == AUTO else tower


def choose_towers(
    requested: tuple[str, str],
    images: int,
    captions: int,
    minutes: float | None,
    cores_worth: float,
    is_installed: Callable[[str], bool],
) -> TowerChoice:
    """The towers of images and texts for those that were requested, which may be `auto`.

    `captions` per image; `cores_worth` is the speed in cores with bf16 instructions.
    """
    usual = (base_of(requested[0]), base_of(requested[1], BASE_TEXT))
    seconds_by_tower = {
        BETTER_IMAGE: images / CORE_IMAGES_PER_SECOND / cores_worth,
        BETTER_TEXT: images * captions / CORE_TEXTS_PER_SECOND / cores_worth,
    }
    open_towers = [
        better for name, better in zip(requested, seconds_by_tower, strict=True) if name == AUTO
    ]
    better_here = [name for name in open_towers if is_installed(name)]
    if not better_here:
        commands = " and ".join(f"m1clip download {name}" for name in open_towers)
        return TowerChoice(*usual, f"{commands} would give a higher recall")
    names = " and ".join(better_here)
    if images < BETTER_FROM_IMAGES:
        few = f"with {plural(images, 'image')}, heads may start from the model general"
        return TowerChoice(*usual, f"{few}, which does not have {names}")
    took = sum(seconds_by_tower[name] for name in better_here) / 60
    about = f"about {plural(max(1, round(took)), 'minute')} more for {plural(images, 'image')}"
    if minutes is not None and took > TIME_FRACTION * minutes:
        return TowerChoice(*usual, f"{names} would take {about}")
    image, text = (
        f"{tower}+{better}" if better in better_here else tower
        for tower, better in zip(usual, seconds_by_tower, strict=True)
    )
    return TowerChoice(image, text, f"{names} on this computer, {about}")


def cores_worth(device: str, facts: MachineInfo, threads: int) -> float:
    """The speed of a device, in cores with bf16 instructions."""
    kind = choose_device(device, facts)
    if kind.partition("+")[0] != "cpu":
        return GPU_CORES
    cores = threads or facts.performance_cores
    return cores / (1.0 if default_precision(kind, facts) == "bf16" else FLOAT32_FACTOR)
