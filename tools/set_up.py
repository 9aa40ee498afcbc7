"""Install packages into the virtual environment of the Makefile, with progress and short errors.

    python3 tools/set_up.py .venv "m1clip and torch" -e .

On a terminal one line shows what is downloaded or installed; elsewhere a line is printed every few
seconds. All output of pip is in .venv/set-up.log. An interrupted set-up continues when the same
command runs again. Only the standard library is used, because nothing is installed yet.
"""

import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn, TextIO

TERMINAL_SECONDS = 0.2  # between two refreshes of the line on a terminal
LINE_SECONDS = 10  # between two lines elsewhere
UNITS = {"bytes": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}

# What pip prints, in all versions since 22.
FILE = re.compile(r"\s*(Downloading|Using cached|Processing) (\S+)(?: \(([\d.]+) (\w+)\))?")
INSTALLING = re.compile(r"Installing collected packages: (.*)")
RETRYING = re.compile(r"WARNING: Retrying \(Retry\(total=(\d+)")

# Text in the output of a failed pip -> what happened and what to do.
FAILURES = (
    (
        "No space left on device",
        "the disk is full; torch alone needs up to 6 GB on Linux: free some space",
    ),
    ("Disk quota exceeded", "your disk quota is used up: free some space"),
    ("Permission denied", "a folder cannot be written to (see the log): change its permissions"),
    (
        "CERTIFICATE_VERIFY_FAILED",
        "the certificate of the package index is not trusted: set PIP_CERT to that of your proxy",
    ),
    (
        "Retrying (Retry(",
        "the package index cannot be reached: check the network (PIP_INDEX_URL and HTTPS_PROXY"
        " set a mirror and a proxy)",
    ),
    ("timed out", "the package index is too slow or cannot be reached: check the network"),
    (
        "No matching distribution found",
        "a package has no build for Python {python} on this system (see the log): try another"
        " version, as in make PYTHON=python3.12",
    ),
)
NO_ENSUREPIP = "Python has no ensurepip: install it (Debian, Ubuntu: apt install python3-venv)"


class PipOutput:
    """What pip is doing, from the lines that it prints."""

    def __init__(self) -> None:
        self.files = 0  # packages that were found
        self.loaded_bytes = 0.0  # of the files that were downloaded
        self.file = ""  # that is downloaded now
        self.file_bytes = 0.0
        self.to_install = 0  # packages; 0 until all are downloaded
        self.retries_left: int | None = None
        self.lines: list[str] = []

    def read(self, line: str) -> None:
        self.lines.append(line)
        retrying = RETRYING.match(line)
        self.retries_left = int(retrying[1]) if retrying else None
        if installing := INSTALLING.match(line):
            self._finish_file()
            self.to_install = len(installing[1].split(", "))
        elif (found := FILE.match(line)) and not found[2].endswith(".metadata"):
            self._finish_file()
            self.files += 1
            if found[1] == "Downloading":
                self.file = Path(found[2]).name
                self.file_bytes = float(found[3] or 0) * UNITS.get(found[4] or "", 0)

    def _finish_file(self) -> None:
        self.loaded_bytes += self.file_bytes
        self.file = ""
        self.file_bytes = 0

    def describe(self, file_done: float, installed: int) -> str:
        """One short line; `file_done` bytes of the file and `installed` packages are done."""
        if self.to_install:
            return f"installing {min(installed, self.to_install)} of {self.to_install} packages"
        parts = []
        if self.files:
            parts.append(f"{self.files} packages")
        if self.loaded_bytes:
            parts.append(f"{size(self.loaded_bytes)} downloaded")
        if self.file_bytes:
            name = "-".join(self.file.split("-")[:2])
            done = f"{size(min(file_done, self.file_bytes))} of {size(self.file_bytes)}"
            parts.append(f"downloading {name}: {done}")
        if self.retries_left is not None:
            parts.append(f"no connection, trying again ({self.retries_left} tries left)")
        return ", ".join(parts) or "looking for packages"


def size(count: float) -> str:
    """A number of bytes: 0.3 MB, 95 MB, 1.2 GB."""
    if count >= 1e9:
        return f"{count / 1e9:.1f} GB"
    return f"{count / 1e6:.{1 if count < 1e6 else 0}f} MB"


def duration(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def explain(lines: list[str]) -> str:
    """What made pip fail and what to do; its last error if the reason is none of the usual ones."""
    text = "\n".join(lines)
    for sign, message in FAILURES:
        if sign in text:
            return message.format(python=".".join(map(str, sys.version_info[:2])))
    errors = [line.strip() for line in lines if line.lower().lstrip().startswith("error")]
    return f"pip failed: {(errors or [line for line in lines if line.strip()] or ['?'])[-1]}"


class Display:
    """One line that changes on a terminal; a line every few seconds elsewhere."""

    def __init__(self, title: str, stream: TextIO) -> None:
        self.title = title
        self.stream = stream
        self.is_terminal = stream.isatty()
        self.began = time.monotonic()
        self.last_text = ""
        self.last_time = self.began

    def show(self, text: str) -> None:
        now = time.monotonic()
        if self.is_terminal:
            width = shutil.get_terminal_size().columns - 1
            line = f"{self.title}: {text}  {duration(now - self.began)}"
            self.stream.write(f"\r{line[:width]}\x1b[K")
        elif text != self.last_text and now - self.last_time >= LINE_SECONDS:
            self.last_text = text
            self.last_time = now
            print(f"  {duration(now - self.began)}  {text}", file=self.stream)
        self.stream.flush()

    def clear(self) -> None:
        if self.is_terminal:
            self.stream.write("\r\x1b[K")
            self.stream.flush()

    @property
    def wait_seconds(self) -> float:
        return TERMINAL_SECONDS if self.is_terminal else 1.0


def fail(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(1)


def make_venv(venv: Path) -> None:
    """Create the environment, also in place of one that is broken or half created."""
    python = venv / "bin/python"
    if python.exists() and (venv / "pyvenv.cfg").exists():
        works = subprocess.run([python, "-m", "pip", "--version"], capture_output=True, check=False)
        if works.returncode == 0:
            return
    print(f"creating the virtual environment {venv} ...", flush=True)
    command = [sys.executable, "-m", "venv", "--clear", str(venv)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        output = result.stdout + result.stderr
        missing = "ensurepip is not available" in output or "No module named" in output
        reason = NO_ENSUREPIP if missing else explain(output.splitlines())
        fail(f"{venv} cannot be created: {reason}, then run the same command again")


def site_packages(venv: Path) -> Path:
    return next(venv.glob("lib/python*/site-packages"))


def remove_incomplete(packages: Path) -> None:
    """Remove the metadata of packages whose installation was interrupted.

    pip writes RECORD last, but takes a package without it for an installed one.
    """
    for folder in packages.glob("*.dist-info"):
        if not (folder / "RECORD").exists():
            shutil.rmtree(folder)


def bytes_of(name: str, folder: Path) -> int:
    """The size of a file that pip is downloading to a folder in `folder`."""
    try:
        return max((path.stat().st_size for path in folder.glob(f"*/{name}")), default=0)
    except OSError:  # it was just moved
        return 0


def install(venv: Path, title: str, arguments: list[str]) -> None:
    """Run pip install, and show what it does."""
    packages = site_packages(venv)
    remove_incomplete(packages)
    before = len(list(packages.glob("*.dist-info")))
    # In the environment: /tmp may be small, and pip downloads to a folder in it.
    downloads = venv / "tmp"
    shutil.rmtree(downloads, ignore_errors=True)
    downloads.mkdir()
    log_path = venv / "set-up.log"
    environment = {**os.environ, "TMPDIR": str(downloads.resolve()), "PYTHONUNBUFFERED": "1"}
    environment |= {"PIP_PROGRESS_BAR": "off", "PIP_NO_INPUT": "1"}
    command = [str(venv / "bin/python"), "-m", "pip", "install", "--disable-pip-version-check"]
    command += ["-c", "constraints.txt", *arguments]
    display = Display(title, sys.stdout)
    output = PipOutput()
    with log_path.open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                output.read(line.rstrip("\n"))
                log.write(line)

        reader = threading.Thread(target=read)
        reader.start()
        try:
            while reader.is_alive():
                installed = len(list(packages.glob("*.dist-info"))) - before
                file_done = bytes_of(output.file, downloads) if output.file else 0
                display.show(output.describe(file_done, max(installed, 0)))
                reader.join(display.wait_seconds)
        except KeyboardInterrupt:
            process.wait()  # the terminal has interrupted it too
            display.clear()
            print("interrupted: run the same command again to continue", file=sys.stderr)
            sys.exit(130)
        finally:
            shutil.rmtree(downloads, ignore_errors=True)
        display.clear()
    if process.wait():
        fail(
            f"{title}: {explain(output.lines)}; then run the same command again, it continues"
            f" (output of pip: {log_path})"
        )
    count = max(output.to_install, 1)
    if count > 1 or time.monotonic() - display.began > LINE_SECONDS:
        loaded = f", {size(output.loaded_bytes)} downloaded" if output.loaded_bytes else ""
        done = "1 package" if count == 1 else f"{count} packages"
        print(f"{title}: installed {done}{loaded} in {duration(time.monotonic() - display.began)}")


def main() -> None:
    venv = Path(sys.argv[1])
    title = sys.argv[2]
    try:
        make_venv(venv)
        install(venv, title, sys.argv[3:])
    except KeyboardInterrupt:
        print("interrupted: run the same command again to continue", file=sys.stderr)
        sys.exit(130)
    except OSError as error:
        fail(f"{title}: {error.strerror or error}: {error.filename or venv}")


if __name__ == "__main__":
    main()
