"""The split of an image stays what it was for a run, however its folder grows."""

import json
from pathlib import Path

import pytest
from image_sets import image
from small_run import exit_code, run_small

from m1clip.data.sources import open_source, open_sources
from m1clip.data.split_record import keep_splits, read_splits, run_of, write_splits
from m1clip.data.synthetic.source import SyntheticSource
from m1clip.data.types import Source
from m1clip.errors import UserError
from m1clip.evaluation.evaluate import open_split
from m1clip.formatting import plural
from m1clip.io import SPLITS_FILE


def grow(folder: Path, count: int, classes: int = 0) -> Path:
    """A folder of `count` images with captions, or of some classes, which keeps those it has."""
    rows = ["image,caption"]
    for number in range(count):
        name = f"{number:03d}.png"
        path = folder / (f"class-{number % classes}" if classes else "") / name
        rows.append(f"{name},photo number {number}")
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            image(number, (16, 16)).save(path)
    if not classes:
        (folder / "captions.csv").write_text("\n".join(rows), encoding="utf-8")
    return folder


def ids(source: Source, split: str) -> list[str]:
    return [sample.id for sample in source.samples(split)] if split in source.splits() else []


def splits_of(source: Source) -> dict[str, str]:
    return {id_: split for split in source.splits() for id_ in ids(source, split)}


@pytest.mark.parametrize("classes", [0, 3])
@pytest.mark.parametrize("sources", [1, 2])
def test_images_of_a_run_keep_their_split_when_the_folder_grows(
    tmp_path: Path, classes: int, sources: int
) -> None:
    names = [str(tmp_path / f"photos-{number}") for number in range(sources)]
    for name in names:
        grow(Path(name), 60, classes)
    first = open_sources(names)
    write_splits(tmp_path, first)
    record, before = read_splits(tmp_path), splits_of(first)
    for name in names:
        grow(Path(name), 150, classes)
    grown = open_sources(names)
    by_hash = splits_of(grown)
    changed = [id_ for id_, split in before.items() if by_hash[id_] != split]
    assert any(before[id_] == "train" for id_ in changed), "otherwise no record would be needed"
    moved = keep_splits(grown, record)
    assert moved.total() == len(changed)
    assert moved["test"] == sum(by_hash[id_] == "test" for id_ in changed)
    assert splits_of(grown) == by_hash | before
    order = {split: ids(grown, split) for split in grown.splits()}
    again = open_sources(names)
    write_splits(tmp_path, grown)
    keep_splits(again, read_splits(tmp_path))
    assert {split: ids(again, split) for split in again.splits()} == order, "as a resumed run"
    assert not keep_splits(again, read_splits(tmp_path))


def test_record_of_unchanged_data_changes_nothing(tmp_path: Path) -> None:
    photos = grow(tmp_path / "photos", 60)
    source = open_source(str(photos))
    write_splits(tmp_path, source)
    order = {split: ids(source, split) for split in source.splits()}
    assert not keep_splits(source, read_splits(tmp_path))
    assert {split: ids(source, split) for split in source.splits()} == order


def test_synthetic_images_have_no_record(tmp_path: Path) -> None:
    write_splits(tmp_path, SyntheticSource(32, 8, 2, 2))
    assert not (tmp_path / SPLITS_FILE).exists()
    assert read_splits(tmp_path) == {}


@pytest.mark.parametrize("text", ["", "[]", "{", '{"images": 3}', '{"images": {"train": 5}}'])
def test_damaged_record_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / SPLITS_FILE).write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=r"splits\.json: damaged; if you delete it"):
        read_splits(tmp_path)


def test_run_of_a_model_is_the_folder_that_contains_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run" / "best").mkdir(parents=True)
    (tmp_path / "run" / "config.toml").touch()
    assert run_of(tmp_path / "run") == run_of(tmp_path / "run" / "best") == tmp_path / "run"
    assert run_of(tmp_path / "other") is None
    monkeypatch.chdir(tmp_path / "run")
    assert run_of("general") is None, "a model with a name is not in the current folder"
    assert run_of("best") == Path()


@pytest.fixture
def grown_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[set[str], Source]:
    """A run on 60 images of a folder that has 150 now: (ids that it was trained on, the data)."""
    monkeypatch.chdir(tmp_path)
    photos = grow(tmp_path / "photos", 60)
    run_small(
        tmp_path / "run",
        {
            "data.source": ["photos"],
            "data.synthetic_images": None,
            "train.steps": 2,
            "train.batch_size": 8,
        },
    )
    trained = set(ids(open_source(str(photos)), "train"))
    return trained, open_source(str(grow(photos, 150)))


def test_eval_uses_no_image_that_the_run_was_trained_on(
    grown_run: tuple[set[str], Source], capsys: pytest.CaptureFixture[str]
) -> None:
    trained, grown = grown_run
    leaked = trained & set(ids(grown, "test"))
    assert leaked
    for model, data in (("run", ()), ("run/best", (str(Path("photos").absolute()),))):
        evaluator = open_split(model, data, device_name="cpu")
        assert not trained & {sample.id for sample in evaluator.data.samples}
        assert evaluator.excluded >= len(leaked)
    assert exit_code("eval", "run", "--device", "cpu") == 0
    printed = capsys.readouterr().out
    images = plural(evaluator.excluded, "image")
    assert f"note       {images} excluded: the data has grown" in printed
    assert exit_code("eval", "run", "--device", "cpu", "--json") == 0
    assert json.loads(capsys.readouterr().out)["excluded"] == evaluator.excluded


@pytest.mark.parametrize("init", ["run", "run/best"])
def test_run_that_starts_from_another_keeps_its_splits(
    grown_run: tuple[set[str], Source], init: str
) -> None:
    trained, _ = grown_run
    run_small(
        Path("second"),
        {
            "data.source": ["photos"],
            "data.synthetic_images": None,
            "train.steps": 1,
            "train.batch_size": 8,
            "transfer.init": init,
        },
    )
    tested = {sample.id for sample in open_split("second", device_name="cpu").data.samples}
    assert tested
    assert not tested & trained
