"""Models by name: `general`, whose heads are in this package."""

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from photos import make_photos
from tower_run import patch_towers

import m1clip
from m1clip.cli.main import main
from m1clip.errors import UserError
from m1clip.model import named
from m1clip.model.clip import build_clip
from m1clip.model.folder import write_boxed
from m1clip.model.named import BOXED, CONFIG, GENERAL, HEADS, BoxedModel, NoModelError
from m1clip.model.presets import CLIPConfig, HeadConfig
from m1clip.model.pretrained import packages
from m1clip.model.pretrained.registry import load_image_tower, load_text_tower
from m1clip.search.index import update_index
from m1clip.search.location import INDEX_FOLDER


def hashes(folder: Path) -> dict[str, str]:
    return {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in (CONFIG, HEADS)
    }


@pytest.fixture
def boxed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model `general` with small random towers and heads; the current folder is empty."""
    patch_towers(monkeypatch)
    monkeypatch.setattr(packages, "installed", lambda tower: True)
    towers = ("efficientnet-lite0", "minilm")
    image_tower, _, preprocess = load_image_tower(towers[0], 64)
    text_tower, _, _ = load_text_tower(towers[1], 16)
    head = HeadConfig(kind="adapter", hidden=4)
    config = CLIPConfig(
        image_tower=image_tower, text_tower=text_tower, image_head=head, text_head=head, embed_dim=8
    )
    folder = tmp_path / "box"
    folder.mkdir()
    torch.manual_seed(0)
    write_boxed(folder, build_clip(config), preprocess)
    monkeypatch.setitem(BOXED, GENERAL, BoxedModel(folder, hashes(folder), towers))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return folder


def test_files_in_the_package_have_the_recorded_hashes_and_sizes() -> None:
    boxed = BOXED[GENERAL]
    assert hashes(boxed.folder) == boxed.sha256
    assert (boxed.folder / HEADS).stat().st_size < 6_000_000


def test_load_by_name_uses_installed_towers_and_saves_a_complete_model(boxed: Path) -> None:
    model = m1clip.load("general")
    texts = model.encode_text(["a dog", "a cat"])
    assert texts.shape == (2, 8)
    model.save("copy")
    copy = m1clip.load("copy")
    assert np.allclose(copy.encode_text(["a dog", "a cat"]), texts, atol=1e-6)


def test_folder_of_the_same_name_comes_first(boxed: Path) -> None:
    m1clip.load("general").save("general")
    assert named.boxed_name("general") is None
    assert len(m1clip.load("general").encode_text("a dog")) == 1


@pytest.mark.parametrize("file", [CONFIG, HEADS])
def test_changed_file_is_rejected_in_one_line(boxed: Path, file: str) -> None:
    content = bytearray((boxed / file).read_bytes())
    content[-1] ^= 1
    (boxed / file).write_bytes(content)
    with pytest.raises(UserError, match="not the file of general that m1clip expects") as caught:
        m1clip.load("general")
    assert file in str(caught.value)
    assert "install m1clip again" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_file_is_reported_in_one_line(boxed: Path) -> None:
    (boxed / HEADS).unlink()
    with pytest.raises(UserError, match=r"heads.safetensors: cannot be read .* install m1clip"):
        m1clip.load("general")


def test_missing_towers_are_reported_with_the_pip_command(
    boxed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "installed", lambda tower: False)
    message = r"^general: its towers are not installed: pip install 'm1clip\[towers\]'$"
    with pytest.raises(UserError, match=message):
        m1clip.load("general")
    photos = make_photos(Path("photos"), 1)
    with pytest.raises(UserError, match=message):
        update_index(photos, "general")
    assert not (photos / INDEX_FOLDER).exists()


def test_index_without_a_model_takes_general_and_remembers_its_name(boxed: Path) -> None:
    photos = make_photos(Path("photos"), 2)
    update_index(photos)
    index = m1clip.Index(photos)
    assert index.model_path == "general"
    assert len(index.search("a dog", 3).nearest) > 0
    assert len(m1clip.Index(photos, "general")) == len(index)
    # The package may move, for example to another environment: the index contains only the name.
    moved = boxed.rename(boxed.with_name("moved"))
    BOXED[GENERAL] = replace(BOXED[GENERAL], folder=moved)
    assert update_index(photos).added == 0


def test_index_without_a_model_and_towers_prints_the_ways_on_and_creates_nothing(
    boxed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(packages, "installed", lambda tower: False)
    photos = make_photos(Path("photos"), 1)
    before = sorted(Path().rglob("*"))
    with pytest.raises(SystemExit) as caught:
        main(["index", str(photos)])
    assert caught.value.code == 2
    printed = capsys.readouterr()
    screen = printed.out + printed.err
    assert "pip install 'm1clip[towers]'" in screen
    assert "m1clip index FOLDER --model MODEL" in screen
    assert "m1clip train FOLDER" in screen
    assert len(screen.splitlines()) <= 24
    assert sorted(Path().rglob("*")) == before


def test_default_model_without_towers_is_an_error(
    boxed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert named.default_model() == Path("general")
    monkeypatch.setattr(packages, "installed", lambda tower: False)
    with pytest.raises(NoModelError, match="no trained model in runs/"):
        named.default_model()


def test_default_model_is_a_run_on_synthetic_images_only_without_the_towers(
    boxed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    demo = Path("runs/demo")
    (demo / "best").mkdir(parents=True)
    (demo / "best" / "model.safetensors").touch()
    (demo / "config.toml").write_text('[data]\nsource = ["synthetic"]\n')
    assert named.default_model() == Path("general")
    monkeypatch.setattr(packages, "installed", lambda tower: False)
    assert named.default_model() == demo
