"""export, classify and similar: what can be done with a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from m1clip.cli.app import Count, app


@app.command
def export(
    model: Path,
    /,
    *,
    to: Literal["openclip", "hf", "safetensors"],
    out: Path | None = None,
    image_size: Count | None = None,
    activation: Literal["gelu", "quick_gelu"] | None = None,
) -> None:
    """Write a model in the form that another program reads; it also brings models of others into m1clip's form.

    m1clip export runs/demo --to openclip writes a folder for open_clip.create_model("local-dir:FOLDER"),
    --to hf one for transformers' CLIPModel.from_pretrained, --to safetensors m1clip's own model folder.

    Parameters
    ----------
    model
        A run, a model folder, a folder of open_clip or of a Hugging Face CLIPModel, or a file with open_clip weights.
    to
        The form to write.
    out
        The new folder; default MODEL-openclip, MODEL-hf or MODEL-safetensors.
    image_size
        For images of another size: learned positions are interpolated.
    activation
        Only for a file of weights that has no config beside it: which activation it was trained with.
    """
    from m1clip.export.layouts import export as write
    from m1clip.training.progress import Screen

    screen = Screen()
    folder = out or model.with_name(f"{model.stem if model.is_file() else model.name}-{to}")
    for note in write(model, to, folder, image_size, activation):
        screen.say(f"note       {note}")
    screen.say(f"written    {folder}")


@app.command
def classify(
    image: Path,
    /,
    *,
    labels: str,
    model: Path | None = None,
    template: Annotated[tuple[str, ...], Parameter(negative="")] = (),
) -> None:
    """Say which of some words suits an image best; the model needs no training for them.

    m1clip classify dog.jpg --labels dog,cat,"a red car" --model runs/frozen

    Parameters
    ----------
    image
        An image.
    labels
        Words or sentences, with commas between them.
    model
        A run, a model folder, or a model of others; default: the newest run in runs/.
    template
        Sentence with {} for the label; give it again for the mean of several. Default: the label as it is.
    """
    from m1clip.evaluation.zeroshot import classify as answer
    from m1clip.inference.encoder import load, newest_run
    from m1clip.training.progress import Screen

    screen = Screen()
    chosen = model or newest_run()
    names = [name.strip() for name in labels.split(",") if name.strip()]
    for name, share in answer(load(chosen), image, names, template or ("{}",)):
        screen.say(f"{100 * share:5.1f}%  {name}")


@app.command
def similar(
    image: Path, /, *, folder: Annotated[Path, Parameter(name="--in")], model: Path | None = None, count: Count = 10
) -> None:
    """Find the images in a folder that are most like one image, by what they show.

    m1clip similar dog.jpg --in ~/Images --model runs/frozen

    Parameters
    ----------
    image
        An image.
    folder
        A folder with images, looked through to the bottom.
    model
        A run, a model folder, or a model of others; default: the newest run in runs/.
    count
        How many to show.
    """
    from m1clip.evaluation.zeroshot import similar as answer
    from m1clip.inference.encoder import load, newest_run
    from m1clip.training.progress import Screen

    screen = Screen()
    found, unreadable = answer(load(model or newest_run()), image, folder, count)
    for path, cosine in found:
        screen.say(f"{cosine:6.3f}  {path}")
    if unreadable:
        screen.warn(f"{len(unreadable)} images cannot be read; first: {unreadable[0]}")
