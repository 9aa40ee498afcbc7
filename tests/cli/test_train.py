"""The commands `m1clip demo` and `m1clip train`."""

import sys
from pathlib import Path

import pytest

from m1clip.cli import train


def test_demo_says_how_to_put_the_command_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make demo` runs it by its path, so the next command would not be found."""
    scripts = tmp_path / "a b" / "bin"
    scripts.mkdir(parents=True)
    monkeypatch.setattr(sys, "executable", str(scripts / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert train._activation() == ""  # not a virtual environment
    (scripts / "activate").touch()
    assert train._activation() == "  source 'a b/bin/activate'\n"
    command = tmp_path / "m1clip"
    command.touch()
    command.chmod(0o755)
    assert train._activation() == ""
