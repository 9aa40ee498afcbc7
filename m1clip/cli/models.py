"""Commands that use a trained model: eval, classify and export."""

from __future__ import annotations

import json as json_text
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from m1clip import console
from m1clip.cli.app import MODELS, PHOTOS, Count, Flag, app
from m1clip.errors import UserError
from m1clip.export import Precision, Target
from m1clip.formatting import one_line, plural

if TYPE_CHECKING:
    import numpy as np

    from m1clip.data.images import BadImage

CLASSIFY_BATCH = 64  # images decoded and encoded together


@app.command(name="eval", group=MODELS, sort_key=3, usage="Usage: m1clip eval MODEL [OPTIONS]")
def evaluate(
    model: Path,
    /,
    *,
    source: Annotated[
        tuple[str, ...], Parameter(name="--data", negative="", show_default=False)
    ] = (),
    split: Literal["train", "val", "test"] = "test",
    classes: Path | None = None,
    template: Annotated[tuple[str, ...], Parameter(negative="", show_default=False)] = (),
    probe: Flag = False,
    analysis: Flag = False,
    out: Path | None = None,
    device: Literal["auto", "cpu", "mps", "cuda"] = "auto",
    json: Flag = False,
) -> None:
    """Evaluate a model: recall in both directions (class folders: top-1 accuracy), with chance level and 95% interval.

    For a run, evaluates its best model on the test split of its data, without images that it was
    trained on; --data evaluates any model on other data. --classes FOLDER, with one folder of
    images per class, measures zero-shot classification by class name.

        m1clip eval runs/demo
        m1clip eval runs/demo --analysis
        m1clip eval general --data photos --split val
        m1clip eval general --classes animals --json

    Parameters
    ----------
    model
        general (the model in the box), a run, a model folder, an exported ONNX folder, or an open_clip or Hugging Face
        model.
    source
        Data to evaluate on; default: the data of the run.
    split
        The split to evaluate on; train shows how much the model overfits.
    classes
        A folder of class folders, for zero-shot accuracy and the most frequent confusions.
    template
        With --classes: a sentence with {} for the class name; repeat the option to average several templates.
    probe
        With --classes: also train a linear probe on 70% of the image features and evaluate it on the rest.
    analysis
        Also show the geometry of the embedding space, the accuracy by how similar the wrong caption is, the recall by
        category (synthetic images; class folders inside folders of categories), the accuracy within batches of the
        training's size, and the worst confusions.
    out
        Folder for the picture of captions with the images that they retrieve, and for the analysis as JSON. Default:
        that of the run; of other models, neither is written.
    device
        Device to run on.
    json
        Print the scores as JSON, and nothing else to the standard output.
    """
    from m1clip.data.split_record import run_of
    from m1clip.evaluation.evaluate import open_split
    from m1clip.evaluation.examples import confusion_examples, retrieval_grid
    from m1clip.evaluation.split_analyses import analysis_table, analyze
    from m1clip.evaluation.zeroshot import zero_shot
    from m1clip.formatting import table
    from m1clip.inference import load
    from m1clip.io import write_json

    if classes is not None:
        loaded = load(model)
        loaded.encoder.use_device(device)
        result = zero_shot(loaded, classes, template, probe)
        for reason in result.unreadable[:3]:
            console.warn(f"skipped {reason}")
        if json:
            scored: dict[str, Any] = {"model": str(model), "classes": str(classes)}
            scored["scores"] = result.scores.as_dict()
            print(json_text.dumps(scored, indent=2))
        else:
            console.print(f"\n{model}, classes of {classes}\n\n{result}")
        return
    evaluator = open_split(model, source, split, device)
    with console.progress(f"computing features of {split} images and captions"):
        features = evaluator.encode()
    name = f"{split}{'-other-data' if source else ''}"
    scores = evaluator.scores(features)
    folder = run_of(model) if out is None else out
    grid = None if folder is None else folder / f"retrieval-{name}.png"
    if grid is not None:
        grid.parent.mkdir(parents=True, exist_ok=True)
        retrieval_grid(evaluator.data, features, split, grid)
    report = None
    if analysis:
        report = analyze(features, evaluator)
        report["confusions"] = confusion_examples(evaluator.data, features)
        if folder is not None:
            write_json(folder / f"analysis-{name}.json", report)
    if json:
        printed: dict[str, Any] = {"model": str(model), "split": split, "scores": scores.as_dict()}
        if evaluator.excluded:
            printed["excluded"] = evaluator.excluded
        if grid is not None:
            printed["image"] = str(grid)
        if report is not None:
            printed["analysis"] = report
        print(json_text.dumps(printed, indent=2))
        return
    console.print(f"\n{model}, {split} split\n\n{scores}\n")
    if evaluator.excluded:
        console.print(
            f"note       {plural(evaluator.excluded, 'image')} excluded: the data has grown, and"
            f" now divides itself otherwise; the run had them in another split than {split}"
        )
    if grid is not None:
        console.print(f"image      {grid}")
    if report is None:
        return
    confused = [(example["caption"], example["truth"]) for example in report["confusions"]]
    console.print(
        f"\n{analysis_table(report)}\n\n{table(('worst confusions', 'retrieved an image of'), confused)}\n"
    )
    if folder is not None:
        console.print(f"analysis   {folder / f'analysis-{name}.json'}")


@app.command(
    group=PHOTOS, sort_key=6, usage="Usage: m1clip classify IMAGE... --labels LABELS [OPTIONS]"
)
def classify(
    *images: Path,
    labels: str,
    model: Path | None = None,
    template: Annotated[tuple[str, ...], Parameter(negative="", show_default=False)] = (),
    json: Flag = False,
) -> None:
    """Show how well each label describes an image; labels can be any words.

    The probabilities of an image add up to 100%, so name all labels that come into question.

        m1clip classify dog.jpg --labels dog,cat,"a red car" --model runs/frozen
        m1clip classify photos more/*.jpg --labels dog,cat --json

    Parameters
    ----------
    images
        Image files, or folders of them; subfolders are included.
    labels
        Words or sentences, separated by commas.
    model
        general (the model in the box), a run, a model folder, an ONNX folder, or an open_clip or Hugging Face model;
        default: the newest run in runs/ that was trained on photos, or general.
    template
        A sentence with {} for the label; repeat the option to average several templates. Default: for labels of
        one or two words, those of eval --classes; else the label alone.
    json
        Print JSON.
    """
    names = [name.strip() for name in labels.split(",") if name.strip()]
    if len(names) < 2:
        raise UserError("--labels: give two or more labels, separated by commas")
    paths = _image_files(images)
    from m1clip.inference import load

    if model is None:
        # Imports torch, which an ONNX folder does not need.
        from m1clip.model.named import default_model

        model = default_model()
    with console.waiting("loading the model"):
        loaded = load(model)
    answers = []
    problems = []
    for start in range(0, len(paths), CLASSIFY_BATCH):
        pixels = _read_images(paths[start : start + CLASSIFY_BATCH], loaded.square)
        problems += [str(result) for result in pixels.values() if isinstance(result, Exception)]
        readable = {
            path: result for path, result in pixels.items() if not isinstance(result, Exception)
        }
        ranked = loaded.classify(list(readable.values()), names, template) if readable else []
        for path, ranking in zip(readable, ranked, strict=True):
            answers.append(
                {"image": str(path), "labels": [{"label": n, "probability": p} for n, p in ranking]}
            )
            if not json:
                _print_ranking(path if len(paths) > 1 else None, ranking)
    if json:
        print(json_text.dumps(answers, indent=2))
    if len(paths) == 1 and problems:
        raise UserError(problems[0])
    for problem in problems:
        print(f"skipped {problem}", file=sys.stderr)
    if problems:
        raise UserError(f"{len(problems):,} of {plural(len(paths), 'image')} cannot be used")


def _image_files(inputs: Sequence[Path]) -> list[Path]:
    """Files as given, and the image files of folders in the order of their names."""
    from m1clip.data.sources.base import walk_images

    if not inputs:
        raise UserError("classify: give an image or a folder of images")
    if not any(path.exists() for path in inputs):
        raise UserError(f"{inputs[0]}: the file is missing")
    paths = []
    for path in inputs:
        if not path.is_dir():
            paths.append(path)
            continue
        names = list(walk_images(path))
        if not names:
            raise UserError(f"{path}: no images in this folder")
        paths += [path / name for name in names]
    return list(dict.fromkeys(paths))


def _read_images(
    paths: Sequence[Path], square: Callable[[Path], np.ndarray]
) -> dict[Path, np.ndarray | BadImage]:
    """The pixels of each image, decoded in threads, or why it cannot be used."""
    from m1clip.data.images import READ_TIMEOUT, BadImage, map_with_timeout
    from m1clip.hardware.machine_info import decode_threads

    def read(path: Path) -> np.ndarray | BadImage:
        try:
            return square(path)
        except BadImage as error:
            return error

    results = map_with_timeout(paths, read, threads=decode_threads())
    late = f"the read did not finish within {READ_TIMEOUT:g} s"
    return {
        path: BadImage(str(path), late) if result is None else result
        for path, result in zip(paths, results, strict=True)
    }


def _print_ranking(path: Path | None, ranking: list[tuple[str, float]]) -> None:
    """Print a line per label; below the path, if there is more than one image."""
    if path is not None:
        print(one_line(str(path)))
    for name, probability in ranking:
        print(f"{100 * probability:5.1f}%  {one_line(name)}")


@app.command(group=MODELS, sort_key=4, usage="Usage: m1clip export MODEL [--to FORMAT] [OPTIONS]")
def export(
    model: Path,
    /,
    *,
    to: Target = "onnx",
    out: Path | None = None,
    source: Annotated[
        tuple[str, ...], Parameter(name="--data", negative="", show_default=False)
    ] = (),
    image_size: Count | None = None,
    int8: Flag = False,
    fp16: Flag = False,
    force: Flag = False,
) -> None:
    """Write a model in the format of another program, or convert one to m1clip's own.

    --to onnx writes image.onnx and text.onnx with everything they need, for any model, and an
    example.py that uses them without torch. --to transformers.js is for JavaScript, --to immich for
    Immich's machine-learning service, --to coreml for Apple devices, --to sentence-transformers for
    SentenceTransformer(FOLDER), --to openclip for open_clip.create_model("local-dir:FOLDER"), --to
    hf for transformers' CLIPModel.from_pretrained, --to safetensors is m1clip's own model folder.
    The export is compared with the original, on the validation images of the run or of --data, and
    deleted if it differs.

        m1clip export runs/demo --to onnx
        python runs/demo-onnx/example.py photo.jpg "a dog"
        m1clip export runs/demo --to onnx --int8 --out small

    Parameters
    ----------
    model
        general (the model in the box), a run, a model folder, an open_clip or Hugging Face CLIPModel folder, or
        open_clip weights next to their config.
    to
        The format to write.
    out
        The new folder; default: MODEL-onnx for --to onnx, and so on.
    source
        Data whose val split the models are compared on; default: the data of the run, else synthetic images.
    image_size
        Convert for another image size: learned position embeddings are interpolated.
    int8
        ONNX: about a third of the size, and faster on CPUs. Layers that int8 would harm stay in float.
    fp16
        ONNX: half the size, for GPUs.
    force
        Keep the export even if it differs from the original.
    """
    from m1clip.export.layouts import export as write

    if int8 and fp16:
        raise UserError("choose one of --int8 and --fp16")
    precision: Precision = "int8" if int8 else "fp16" if fp16 else "fp32"
    folder = write(model, to, out, image_size, source, precision, force)
    console.print(f"exported   {folder}")
