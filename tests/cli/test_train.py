"""The commands `m1clip demo` and `m1clip train`."""

import signal
import sys
from pathlib import Path

import pytest
from small_run import exit_code

from m1clip.cli import train
from m1clip.monitor import report
from m1clip.training import run as runs
from m1clip.training.distributed import Ranks
from m1clip.training.process import Interrupted


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


def test_next_commands_after_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "has_matplotlib", lambda: False)
    lines = train._next_steps(Path("runs/demo")).splitlines()
    commands = [line.split("  ")[1] for line in lines]
    assert {"m1clip monitor runs/demo", "m1clip train --preset demo --lr 0.001"} <= set(commands)
    (line,) = [line for line in lines if "m1clip report" in line]
    assert line.endswith("as one HTML file (pip install 'm1clip[plot]' for the curves)")
    monkeypatch.setattr(report, "has_matplotlib", lambda: True)
    assert "m1clip[plot]" not in train._next_steps(Path("runs/demo"))


@pytest.mark.parametrize(
    ("saved", "hint"),
    [
        (False, "no step was saved, so start it again"),
        (True, "continue with: m1clip train --resume RUN"),
    ],
)
def test_signal_outside_of_a_step_says_whether_the_run_can_be_continued(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    saved: bool,
    hint: str,
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()

    def interrupted(**_: object) -> None:
        with runs._open_session(folder, Ranks(), None):
            if saved:
                (folder / "checkpoints" / "step-000003").mkdir(parents=True)
            raise Interrupted(signal.SIGINT)

    monkeypatch.setattr(runs, "train", interrupted)
    assert exit_code("train", "synthetic") == 130
    line = capsys.readouterr().out.splitlines()[-1]
    assert line == f"stopped by Ctrl-C; {hint.replace('RUN', str(folder))}"
