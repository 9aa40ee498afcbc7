"""tools/train_general.py, which trains the model in the box: it runs, repeats, and writes what is loaded."""

import csv
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from image_sets import image
from PIL import Image
from tower_run import patch_towers

from m1clip.model import named
from m1clip.model.named import BOXED, CONFIG, GENERAL, HEADS

TOOL = Path(__file__).parents[2] / "tools" / "train_general.py"
IMAGES, CLASSES = 12, 5


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script with random towers, few classes and short stages."""
    patch_towers(monkeypatch)
    spec = importlib.util.spec_from_file_location("train_general", TOOL)
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "train_general", tool)  # for its dataclasses
    spec.loader.exec_module(tool)
    boxed = replace(BOXED[GENERAL], towers=("efficientnet-lite0", "minilm"))
    monkeypatch.setitem(named.BOXED, GENERAL, boxed)
    monkeypatch.setattr(tool, "EMBED_DIM", 4)
    monkeypatch.setattr(tool, "HIDDEN", 8)
    monkeypatch.setattr(tool, "EVERYDAY", "pet: 0 1; animal: 0-4")
    stages = [replace(stage, epochs=1, batch=6, class_batch=4) for stage in tool.STAGES]
    monkeypatch.setattr(tool, "STAGES", stages)
    monkeypatch.setattr(tool, "tower_image_size", lambda name: 64)
    # The classifiers are in packages that are not installed here.
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(CLASSES, 4120, generator=generator)
    logits = lambda features, towers: features.float() @ weight[:, : features.shape[1]].T  # noqa: E731
    monkeypatch.setattr(tool, "class_logits", logits)
    return tool


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "captioned"
    folder.mkdir()
    with (folder / "captions.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("image", "caption", "split"))
        for number in range(IMAGES):
            image(number).save(folder / f"{number}.png")
            writer.writerow((f"{number}.png", f"photo {'abcdefghijkl'[number]}", "train"))
            writer.writerow((f"{number}.png", f"an image {number}", "train"))
    (tmp_path / "names.txt").write_text("cat\ndog\nbird\nfish\ncow\n", encoding="utf-8")
    return folder


def run(tool: ModuleType, monkeypatch: pytest.MonkeyPatch, out: Path, *words: object) -> bytes:
    arguments = [*words, "--cache", out.parent / "cache", "--out", out]
    monkeypatch.setattr(sys, "argv", ["train_general.py", *map(str, arguments)])
    tool.main()
    assert (out / CONFIG).is_file()
    return (out / HEADS).read_bytes()


def test_same_data_gives_the_same_file(
    tool: ModuleType, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("red_fox", "camera"):
        (tmp_path / "classes" / name).mkdir(parents=True)
        image(3).save(tmp_path / "classes" / name / "1.png")
    words = ["--captions", data, "--names", tmp_path / "names.txt"]
    with_classes = [*words, "--classes", tmp_path / "classes"]
    first = run(tool, monkeypatch, tmp_path / "1" / "out", *with_classes)
    assert len(first) > 1000
    assert run(tool, monkeypatch, tmp_path / "2" / "out", *with_classes) == first
    assert run(tool, monkeypatch, tmp_path / "3" / "out", *words) != first


def test_class_has_its_everyday_names_and_held_out_folders_are_not_read(
    tool: ModuleType, tmp_path: Path
) -> None:
    for name in ("red_fox", "camera"):
        (tmp_path / "classes" / name).mkdir(parents=True)
        image(3).save(tmp_path / "classes" / name / "1.png")
    towers = tool.Towers(tmp_path / "cache")
    imagenet = ["Cat", "dog", "bird", "fish", "cow"]
    images, labels, named, names = tool.read_classes([tmp_path / "classes"], imagenet, towers)
    vocabulary = ["animal", "bird", "cat", "cow", "dog", "fish", "pet", "red fox"]
    names_of_classes = [
        [name for name, yes in zip(vocabulary, row, strict=True) if yes] for row in named
    ]
    assert names_of_classes == [
        ["animal", "cat", "pet"],
        ["animal", "dog", "pet"],
        ["animal", "bird"],
        ["animal", "fish"],
        ["animal", "cow"],
        ["red fox"],
    ]
    assert (len(images), labels.tolist(), len(names)) == (1, [5], len(vocabulary))


def test_logits_are_the_sum_of_the_classifiers_of_both_towers(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = importlib.util.module_from_spec(tool.__spec__)
    monkeypatch.setitem(sys.modules, "train_general", loaded)
    tool.__spec__.loader.exec_module(loaded)  # with its own class_logits
    numbers = torch.arange(float(CLASSES))
    weights = iter([torch.outer(numbers, row) for row in torch.eye(3)[:2]])
    classifier = lambda path: {"_fc.weight": next(weights)}  # noqa: E731
    boxed = replace(BOXED[GENERAL], towers=("efficientnet-lite0+lite2", "minilm"))
    monkeypatch.setitem(named.BOXED, GENERAL, boxed)
    monkeypatch.setattr(loaded, "HEAD_CHANNELS", 3)
    monkeypatch.setattr(loaded, "package_file", lambda package, name: package)
    monkeypatch.setattr(loaded, "read_checkpoint", classifier)
    image = SimpleNamespace(parts=[SimpleNamespace(width=4), SimpleNamespace(width=5)])
    features = torch.arange(9, dtype=torch.float16)[None]
    logits = loaded.class_logits(features, SimpleNamespace(image=image))
    # Features 1 and 7 are the ones that the classifiers use.
    assert torch.equal(logits, (1 + 7) * (numbers - numbers.mean())[None])


def test_cached_features_are_those_of_the_named_images(
    tool: ModuleType, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "CHUNK", 4)
    towers = tool.Towers(tmp_path / "cache")
    names = [f"{number}.png" for number in range(IMAGES)]
    rows = towers.images(data, names)
    assert torch.equal(towers.images(data, names), rows)
    assert torch.equal(towers.images(data, names[::-1]), rows.flip(0))


def test_mirror_images_have_the_features_of_flipped_images(
    tool: ModuleType, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    towers = tool.Towers(tmp_path / "cache")
    flipped = tmp_path / "flipped"
    flipped.mkdir()
    names = [f"{number}.png" for number in range(IMAGES)]
    for number, name in enumerate(names):
        image(number).transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(flipped / name)
    mirrored = tool.read_captions(data, towers, mirrored=True)
    assert mirrored.folders == {tool.MIRRORED: IMAGES}
    torch.testing.assert_close(
        mirrored.images.float(), towers.images(flipped, names).float(), rtol=0.05, atol=0.02
    )
    assert not torch.equal(mirrored.images, tool.read_captions(data, towers).images)
    words = ["--captions", data, "--names", tmp_path / "names.txt"]
    stages = [replace(stage, mirrored=True) for stage in tool.STAGES]
    plain = run(tool, monkeypatch, tmp_path / "out1", *words)
    monkeypatch.setattr(tool, "STAGES", stages)
    assert run(tool, monkeypatch, tmp_path / "out2", *words, "--mirror", data) != plain


def test_images_of_a_folder_are_drawn_as_often_as_a_stage_says(tool: ModuleType) -> None:
    stage = replace(tool.LARGE, draws={"a": 2, "c": 0, "d": 0.5, "e": 1.5})
    folders = {"a": 3, "b": 2, "c": 4, "d": 6, "e": 2}
    order = tool.epoch_order(stage, folders, np.random.default_rng(0)).tolist()
    assert sorted(number for number in order if number < 9) == [0, 0, 1, 1, 2, 2, 3, 4]
    half = [number for number in order if 9 <= number < 15]
    assert len(half) == len(set(half)) == 3
    assert sorted(number for number in order if number >= 15) in ([15, 15, 16], [15, 16, 16])
    assert len(order) == sum(stage.drawn(folders).values())


def test_model_is_the_mean_of_the_stages_that_have_images(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    stages = [
        SimpleNamespace(share=0.3, weight=1.0, mirrored=False, drawn=lambda folders: {"a": 2}),
        SimpleNamespace(share=0.1, weight=5.0, mirrored=False, drawn=lambda folders: {"a": 1}),
        SimpleNamespace(share=0.6, weight=9.0, mirrored=False, drawn=lambda folders: {"a": 0}),
    ]
    monkeypatch.setattr(tool, "STAGES", stages)
    begun = []

    def heads_after(
        stage: SimpleNamespace, model: torch.nn.Linear, initial: dict[str, torch.Tensor], *_: object
    ) -> dict[str, torch.Tensor]:
        begun.append(initial["weight"].item())
        return {"weight": torch.full((1, 1), stage.weight)}

    monkeypatch.setattr(tool, "heads_after", heads_after)
    start = model.weight.item()
    tool.train_mean(model, SimpleNamespace(folders={}), None, Path())
    assert begun == [start, start]
    assert model.weight.item() == pytest.approx(0.75 * 1 + 0.25 * 5)


def test_training_that_is_in_the_cache_is_not_repeated(
    tool: ModuleType, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--captions", data, "--names", tmp_path / "names.txt"]
    trained = []
    train = tool.train

    def counted(model: object, stage: object, *rest: object) -> None:
        trained.append(stage)
        train(model, stage, *rest)

    monkeypatch.setattr(tool, "train", counted)
    first = run(tool, monkeypatch, tmp_path / "out1", *words)
    stages = len(trained)
    assert run(tool, monkeypatch, tmp_path / "out2", *words) == first
    assert len(trained) == stages > 1
    monkeypatch.setattr(tool, "STAGES", [replace(stage, weight_decay=9) for stage in tool.STAGES])
    assert run(tool, monkeypatch, tmp_path / "out3", *words) != first
    assert len(trained) == 2 * stages


def test_class_of_a_folder_has_its_synonyms(tool: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "classes" / "forest").mkdir(parents=True)
    image(3).save(tmp_path / "classes" / "forest" / "1.png")
    towers = tool.Towers(tmp_path / "cache")
    imagenet = ["cat", "dog", "bird", "fish", "trees"]
    _, labels, named, names = tool.read_classes([tmp_path / "classes"], imagenet, towers)
    vocabulary = ["animal", "bird", "cat", "dog", "fish", "forest", "pet", "trees", "woods"]
    assert labels.tolist() == [5]
    assert len(names) == len(vocabulary)
    own = [name for name, yes in zip(vocabulary, named[5], strict=True) if yes]
    assert own == ["forest", "trees", "woods"]
    assert [name for name, yes in zip(vocabulary, named[4], strict=True) if yes] == [
        "animal",
        "trees",
    ]


def test_features_of_many_texts_are_those_of_each(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["a dog", "two cats", "a red car on a street", "snow", "a house"]
    expected = tool.Towers(tmp_path / "one").texts("x", texts)
    monkeypatch.setattr(tool, "TEXT_CHUNK", 2)
    towers = tool.Towers(tmp_path / "many")
    rows = towers.texts("x", texts)
    torch.testing.assert_close(rows, expected, rtol=0.02, atol=0.02)
    assert torch.equal(towers.texts("x", texts), rows)
    assert len(list((tmp_path / "many").iterdir())) == 3


def test_validation_images_are_not_trained_on(tool: ModuleType, tmp_path: Path) -> None:
    for folder, name in (("caltech101", "ferry"), ("caltech101", "fox"), ("scenes", "forest")):
        (tmp_path / folder / name).mkdir(parents=True)
        for number in range(14):
            image(number).save(tmp_path / folder / name / f"{number:02d}.png")
    towers = tool.Towers(tmp_path / "cache")
    folders = [tmp_path / "caltech101", tmp_path / "scenes"]
    validation = tool.Validation([], folders, towers)
    counts = {name: len(images) for name, (images, *_) in validation.classes.items()}
    assert counts == {"caltech101": 14, "scenes": 2}
    (_, used), (_, scenes) = (tool.class_folders(folder)[0] for folder in folders)
    assert used[0].startswith("fox/")
    assert scenes[-1] == "forest/11.png"
    figures = validation.figures(tool.new_model(towers).eval())
    assert set(figures) == {"caltech101", "scenes"}
    assert figures["scenes"] == 100  # of one class
