"""The set-up of `make demo` and `make test`: its progress, its errors, and after an interruption."""

import io
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import m1clip

ROOT = Path(m1clip.__file__).parent.parent
SCRIPT = ROOT / "tools/set_up.py"
pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="not run from the repository")
sys.path.insert(0, str(SCRIPT.parent))

# Lines of pip 23 and 26.
OUTPUT = """\
Obtaining file:///project
  Installing build dependencies: started
Collecting rich>=13.7 (from project==0.1)
  Downloading rich-15.0.0-py3-none-any.whl.metadata (18 kB)
Collecting torch==2.13.0 (from project==0.1)
  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl.metadata (29 kB)
Using cached rich-15.0.0-py3-none-any.whl (310 kB)
Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (887.9 MB)
"""


def test_progress_names_the_file_that_is_downloaded_and_its_size() -> None:
    from set_up import PipOutput

    output = PipOutput()
    assert output.describe(0, 0) == "looking for packages"
    for line in OUTPUT.splitlines():
        output.read(line)
    expected = "2 packages, downloading torch-2.13.0: 221 MB of 888 MB"
    assert output.describe(221e6, 0) == expected
    output.read("Installing collected packages: rich, torch, project")
    assert output.describe(0, 2) == "installing 2 of 3 packages"
    assert output.loaded_bytes == 887.9e6


def test_progress_says_that_there_is_no_connection_until_there_is_one() -> None:
    from set_up import PipOutput

    output = PipOutput()
    output.read("WARNING: Retrying (Retry(total=3, connect=None)) after connection broken by ...")
    assert "no connection, trying again (3 tries left)" in output.describe(0, 0)
    output.read("Collecting rich")
    assert "no connection" not in output.describe(0, 0)


def test_lines_without_a_terminal_are_few_and_different(monkeypatch: pytest.MonkeyPatch) -> None:
    import set_up

    now = [0.0]
    monkeypatch.setattr(set_up.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    display = set_up.Display("m1clip", stream)
    for second in range(60):
        now[0] = second
        display.show("installing 1 of 3 packages" if second < 45 else "installing 2 of 3 packages")
    assert stream.getvalue() == (
        "  0:10  installing 1 of 3 packages\n  0:45  installing 2 of 3 packages\n"
    )


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["ERROR: Could not install packages: [Errno 28] No space left on device"], "disk is full"),
        (
            [
                "WARNING: Retrying (Retry(total=0, connect=None)) after connection broken",
                "ERROR: No matching distribution found for torch==2.13.0",
            ],
            "cannot be reached: check the network",
        ),
        (["ERROR: No matching distribution found for torch==2.13.0"], "PYTHON=python3.12"),
        (["  error: subprocess-exited-with-error", "note: not pip"], "subprocess-exited"),
        ([], "pip failed"),
    ],
)
def test_a_failure_is_explained_by_its_cause(lines: list[str], words: str) -> None:
    from set_up import explain

    assert words in explain(lines)
    assert "\n" not in explain(lines)


def set_up(venv: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (venv.parent / "constraints.txt").touch()
    command = [sys.executable, SCRIPT, str(venv), "example", "--no-index", *arguments]
    return subprocess.run(
        command, cwd=venv.parent, capture_output=True, text=True, timeout=300, check=False
    )


def write_wheel(folder: Path, name: str) -> None:
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", "value = 1\n")
        info = f"{name}-1.0.dist-info"
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{info}/WHEEL", tags)
        wheel.writestr(f"{info}/RECORD", "")


@pytest.mark.slow
def test_interrupted_set_up_continues(tmp_path: Path) -> None:
    for name in ("first_example", "second_example"):
        write_wheel(tmp_path, name)
    venv = tmp_path / "venv"
    # Interrupted between Python and pip.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    packages = ("--find-links", str(tmp_path), "first_example", "second_example")
    result = set_up(venv, *packages)
    assert result.returncode == 0, result.stderr
    assert "example: installed 2 packages" in result.stdout

    # Interrupted while pip installed the second package: files are missing, and so is RECORD.
    installed = next(venv.glob("lib/python*/site-packages"))
    (installed / "second_example.py").unlink()
    (installed / "second_example-1.0.dist-info/RECORD").unlink()
    result = set_up(venv, *packages)
    assert result.returncode == 0, result.stderr
    assert (installed / "second_example.py").exists()

    result = set_up(venv, *packages)
    assert (result.returncode, result.stdout) == (0, "")  # nothing was left to do

    result = set_up(venv, "missing_example")
    assert result.returncode == 1
    assert "PYTHON=python3.12" in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (venv / "tmp").exists()
