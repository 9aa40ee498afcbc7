"""The wheel in a fresh environment outside the repository: its data is included, and every command runs."""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from small_run import made_once

import m1clip

ROOT = Path(m1clip.__file__).parent.parent

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (ROOT / "pyproject.toml").exists(), reason="not run from the repository"
    ),
]


def run(*words: str | Path, cwd: Path, timeout: float = 300) -> str:
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    env |= {"COLUMNS": "200", "NO_COLOR": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    # What m1clip keeps for a user is not that of the other tests.
    env |= {"XDG_DATA_HOME": str(cwd / ".data"), "XDG_CACHE_HOME": str(cwd / ".cache")}
    env |= {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(folder: Path) -> None:
    folder.mkdir()
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)


@pytest.fixture(scope="module")
def built() -> Path:
    """A folder with the sdist, and the wheel that was built from it; without the network."""
    return made_once("built", build)


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (wheel,) = built.glob("m1clip-*.whl")
    return wheel


def test_sdist_contains_all_files_of_the_repository_and_its_tests_run(
    built: Path, tmp_path: Path
) -> None:
    (archive,) = built.glob("m1clip-*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path, filter="data")
    (root,) = tmp_path.iterdir()
    present = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout
    names = [name for name in tracked.splitlines() if (ROOT / name).exists()]
    assert [name for name in names if not name.startswith(".") and name not in present] == []
    assert {
        "Makefile",
        "docs/python.md",
        "benchmarks/README.md",
        "hatch_build.py",
        "tests/conftest.py",
    } <= present
    words = [
        "-m",
        "pytest",
        "-v",
        "-p",
        "no:cacheprovider",
        "tests/test_readme.py",
        "-k",
        "links_exist",
    ]
    assert "2 passed" in run(sys.executable, *words, cwd=root)


def test_readme_of_the_package_has_no_relative_links(wheel: Path) -> None:
    (name,) = [
        name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".dist-info/METADATA")
    ]
    metadata = zipfile.ZipFile(wheel).read(name).decode()
    assert "Description-Content-Type: text/markdown" in metadata
    assert "# m1clip" in metadata
    assert "docs/finetune.md" not in re.findall(r"\]\(([^)]*)\)", metadata)
    assert re.findall(r"\]\((?!https?:|#)[^)]*\)", metadata) == []
    assert "pip install -e" in metadata


def test_wheel_contains_the_package_and_its_data(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    package = ROOT / "m1clip"
    for path in package.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            assert path.relative_to(ROOT).as_posix() in names
    assert {"m1clip/presets/demo.toml", "m1clip/presets/original.toml"} <= names
    assert any(name.startswith("m1clip/text/") and name.endswith(".gz") for name in names)
    assert {name.partition("/")[0] for name in names} == {
        "m1clip",
        f"m1clip-{m1clip.__version__}.dist-info",
    }


def test_every_command_runs_in_a_fresh_environment(wheel: Path, tmp_path: Path) -> None:
    venv, home = tmp_path / "a venv", tmp_path / "some where"  # spaces must not hurt
    home.mkdir()
    run(sys.executable, "-m", "venv", venv, cwd=tmp_path)
    scripts = venv / ("Scripts" if os.name == "nt" else "bin")
    run(scripts / "python", "-m", "pip", "install", "--no-deps", "--no-index", wheel, cwd=home)
    # Libraries come from this environment, but not its editable m1clip: .pth files in a folder
    # added by a .pth file are not read.
    site = Path(
        run(
            scripts / "python",
            "-c",
            "import sysconfig; print(sysconfig.get_path('purelib'))",
            cwd=home,
        ).strip()
    )
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    where = run(scripts / "python", "-c", "import m1clip; print(m1clip.__file__)", cwd=home)
    assert Path(where.strip()).is_relative_to(site)
    assert m1clip.__version__ in run(scripts / "m1clip", "--version", cwd=home)

    smoke = ROOT / "tests" / "wheel_smoke.py"
    printed = run(scripts / "python", smoke, cwd=home, timeout=1500)
    assert printed.count(" m1clip ") > 25
    for name in ("small", "demo"):
        assert (home / "runs" / name / "model" / "model.safetensors").is_file()
