"""Commands about models with a name: models and download."""

from __future__ import annotations

import json as json_text
import shutil
import sys
import time
from typing import TYPE_CHECKING

from m1clip import console
from m1clip.cli.app import MODELS, Flag, app
from m1clip.errors import UserError
from m1clip.formatting import MISSING, did_you_mean, one_line, percent, plural, size, table

if TYPE_CHECKING:
    from m1clip.model.hub import DownloadPlan
    from m1clip.model.listing import ListedModel, ListedTower, Speed

MEASURE_SECONDS = 4.0
MEASURE_BATCH = 32  # images that are encoded at a time
LEGEND = """\
here: on this computer. ImageNet: zero-shot accuracy as published. images/s: measured here, by m1clip models
--measure NAME or by m1clip index (with reading the files). m1clip models NAME shows the sources of the figures.
Commands accept these names wherever they take a model. m1clip download NAME gets one; owner/name gets any other
model of the Hugging Face Hub."""
TOWERS_LEGEND = """\
Towers for training on your images (m1clip train). Those on this computer are used by default, beside the ones of
m1clip[towers]; --image-tower and --text-tower choose otherwise."""


@app.command(group=MODELS, sort_key=1, usage="Usage: m1clip models [NAME] [OPTIONS]")
def models(name: str | None = None, /, *, measure: Flag = False, json: Flag = False) -> None:
    """List models and towers that can be used by name: size, license, published accuracy, and what is here already.

    Nothing is downloaded: the figures come with m1clip, and each has its source.

        m1clip models
        m1clip models siglip2-b-16
        m1clip models --measure laion-vit-b-32

    Parameters
    ----------
    name
        Show all about this model.
    measure
        Measure how many images per second this model encodes here; takes a few seconds.
    json
        Print JSON.
    """
    from m1clip.model.listing import list_models, list_towers

    towers = {tower.name: tower for tower in list_towers()}
    listed = {model.name: model for model in list_models()}
    if name is None:
        if measure:
            raise UserError("--measure: name the model, as in m1clip models --measure general")
        if json:
            print(json_text.dumps([model.to_json() for model in listed.values()], indent=2))
            return
        console.print(models_table(list(listed.values())))
        console.print(f"\n{LEGEND}\n")
        console.print(towers_table(list(towers.values())))
        console.print(f"\n{TOWERS_LEGEND}")
        return
    if name in towers:
        if measure:
            raise UserError(f"--measure {name}: a tower alone is not a model")
        tower = towers[name]
        print(json_text.dumps(tower.to_json(), indent=2) if json else _tower_details(tower))
        return
    speed = _measure(name) if measure else None
    if name not in listed and speed is None:
        raise UserError(
            f"{one_line(name)}: not in the list{did_you_mean(name, listed)} (m1clip models)"
        )
    if name in listed:
        model = next(model for model in list_models() if model.name == name)  # with the new speed
        print(json_text.dumps(model.to_json(), indent=2) if json else _details(model))
    elif speed is not None:
        print(json_text.dumps({"name": name, **vars(speed)}, indent=2) if json else _speed(speed))


def models_table(listed: list[ListedModel]) -> str:
    """The table of `m1clip models`."""
    head = ("name", "here", "size", "parameters", "ImageNet", "images/s", "languages", "license")
    return table(head, (_row(model) for model in listed))


def towers_table(listed: list[ListedTower]) -> str:
    """The table of towers of `m1clip models`."""
    head = ("tower", "of", "here", "size", "parameters", "license", "what it is")
    rows = (
        (
            tower.name,
            f"{tower.side}s",
            MISSING if tower.folder is None else "yes",
            size(tower.megabytes * 1e6),
            f"{tower.parameters:.0f} M",
            tower.license,
            tower.note,
        )
        for tower in listed
    )
    return table(head, rows)


def _tower_details(tower: ListedTower) -> str:
    """All about a tower, one line each, with sources."""
    lines = {
        "tower": f"{tower.name}: {tower.note}",
        "repository": tower.repository,
        "here": tower.folder or f"no: m1clip download {tower.name}",
        "use it": f"m1clip train FOLDER --{tower.side}-tower {tower.name}",
        "parameters": f"{tower.parameters:g} M ({tower.parameters_source})",
        "size": f"{size(tower.megabytes * 1e6)} ({tower.megabytes_source})",
        "license": tower.license,
    }
    return "\n".join(f"{key:<12}{one_line(value)}" for key, value in lines.items())


def _row(model: ListedModel) -> tuple[str, ...]:
    return (
        model.name,
        MISSING if model.folder is None else "yes",
        size(model.megabytes * 1e6),
        f"{model.parameters:.0f} M",
        MISSING if model.imagenet is None else percent(model.imagenet / 100),
        MISSING if model.speed is None else f"{model.speed.images_per_second:,.0f}",
        model.languages.partition(" (")[0],
        model.license,
    )


def _details(model: ListedModel) -> str:
    """All about a model, one line each, with sources."""
    source = model.imagenet_source
    accuracy = "not published" if model.imagenet is None else f"{model.imagenet:g}% ({source})"
    lines = {
        "model": f"{model.name}: {model.note}",
        "repository": model.repository or "in this package",
        "here": model.folder or f"no: m1clip download {model.name}",
        "needs": model.needs or "nothing else",
        "images": f"{model.image_size} x {model.image_size} pixels",
        "parameters": f"{model.parameters:g} M ({model.parameters_source})",
        "size": f"{size(model.megabytes * 1e6)} ({model.megabytes_source})",
        "license": model.license,
        "languages": model.languages,
        "ImageNet": f"zero-shot accuracy {accuracy}" if model.imagenet else accuracy,
        "speed": _speed(model.speed) if model.speed else "not measured on this computer",
    }
    if model.repository is None and model.folder is None:
        lines["here"] = f"no: {model.needs}"
    return "\n".join(f"{key:<12}{one_line(value)}" for key, value in lines.items())


def _speed(speed: Speed) -> str:
    how = "pixels in memory" if speed.how == "encode" else "m1clip index, with reading the files"
    images = plural(speed.images, "image")
    return f"{speed.images_per_second:,.1f} images/s on {speed.device} ({images}; {how})"


def _measure(name: str) -> Speed:
    """Encode random pixels for a few seconds, and keep the speed."""
    import numpy as np

    from m1clip.inference import load
    from m1clip.model.listing import keep_speed

    model = load(name)
    side = model.preprocess.image_size
    pixels = np.random.default_rng(0).integers(
        0, 256, size=(MEASURE_BATCH, side, side, 3), dtype=np.uint8
    )
    model.encode_image(pixels)  # warms up
    images = 0
    began = time.perf_counter()
    while (seconds := time.perf_counter() - began) < MEASURE_SECONDS:
        model.encode_image(pixels)
        images += len(pixels)
    device = str(getattr(model.encoder, "device", "cpu"))  # of torch
    return keep_speed(name, images, seconds, device, "encode")


@app.command(group=MODELS, sort_key=2, usage="Usage: m1clip download NAME [OPTIONS]")
def download(name: str, /, *, yes: Flag = False, update: Flag = False) -> None:
    """Download a model from the Hugging Face Hub. No other command downloads a model.

    Shows the size and the license and asks first. The model goes to the cache of Hugging Face
    ($HF_HOME, by default ~/.cache/huggingface), and a model that is there already is used as it is.
    Ctrl-C at any time: the next call continues. Every file is checked against the hash that the Hub
    lists. HF_TOKEN or hf auth login give access to gated models, HF_ENDPOINT is the address of a
    mirror, HTTPS_PROXY of a proxy; HF_HUB_OFFLINE=1 forbids downloads.

        m1clip download siglip2-b-32
        m1clip download openai/clip-vit-base-patch32 --yes

    Parameters
    ----------
    name
        A name of m1clip models, or owner/name of any model on the Hub.
    yes
        Do not ask; needed where there is no terminal to ask on.
    update
        Look for a newer version, even if the model is here.
    """
    from m1clip.model.catalog import TOWER_CATALOG
    from m1clip.model.hub import fetch, find_checked, plan_download, repository_of
    from m1clip.model.named import catalog_name

    repository = repository_of(name)
    shown = catalog_name(repository)
    folder = None if update else find_checked(repository)
    if folder is None:
        plan = plan_download(repository)
        if plan.present_bytes < plan.total_bytes:
            for line in _plan_lines(plan):
                console.print(line)
            if not (yes or _agrees()):
                raise UserError("nothing was downloaded")
        folder = fetch(plan)
    else:
        console.print(f"{shown} is on this computer; --update looks for a newer version")
    console.print(f"folder     {folder}")
    use = "train FOLDER" if shown in TOWER_CATALOG else f"index ~/Pictures --model {shown}"
    console.print(f"use it     m1clip {use}")


def _plan_lines(plan: DownloadPlan) -> list[str]:
    from m1clip.model.hub_files import cache_folder

    cache = cache_folder()
    existing = next(
        existing_folder for existing_folder in (cache, *cache.parents) if existing_folder.exists()
    )
    present = plan.present_bytes
    cached_note = f", {size(present)} of it here already" if present else ""
    names = ", ".join(file.name for file in plan.files)
    return [
        f"model      {plan.repository} at {plan.endpoint} (commit {plan.commit[:8]})",
        f"license    {plan.license}",
        f"files      {names}",
        f"size       {size(plan.total_bytes)}{cached_note}",
        f"to         {cache} ({size(shutil.disk_usage(existing).free)} free)",
    ]


def _agrees() -> bool:
    """Ask on the terminal; UserError where there is none."""
    if not sys.stdin.isatty():
        raise UserError("nothing was downloaded: there is no terminal to ask on; add --yes")
    try:
        return input("download it? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False
