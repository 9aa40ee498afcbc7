"""Run the long forms of the reliability tests side by side, each part in a process of its own.

    .venv/bin/python tests/reliability/long_parallel.py build/long --processes 14 --seconds 540

FOLDER holds afterwards: rows.json, what each part has counted (written as each one ends, so that nothing is lost if
this is killed); jobs.json, how each ended; output.txt, the words of those that did not pass. Parts that are not over
after --seconds are stopped and named; the same command with --rest runs them, and those that failed, alone. --merge,
or reliability_merge.py on another machine, adds the parts up and writes docs/results/reliability.json and the table.
A copy of the tree without git tells its commit by the variable M1CLIP_COMMIT.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

import reliability_table  # noqa: E402
from reliability_merge import FILE, add_up, merge  # noqa: E402
from reliability_results import COMMIT, ROOT, ROWS, commit, put, rows_of, write_rows  # noqa: E402

HERE = Path(__file__).parent
LONGEST = ("kill_and_resume", "signal_phases", "hostile", "fuzz")  # begun first, so that none of them ends alone
NOT_OVER, PASSED, FAILED, SKIPPED = "not over", "passed", "failed", "skipped"


@dataclass
class Job:
    """One part that runs: a pytest of its own, with its own file of rows and its own temporary folder."""

    test: str
    process: subprocess.Popen[bytes]
    rows: Path
    output: Path
    began: float

    def ended(self) -> str:
        """How it ended, by its exit code and what pytest says: a test that was skipped proves nothing."""
        if self.process.returncode != 0:
            return FAILED
        return PASSED if re.search(r"\b1 passed\b", self.words()) else SKIPPED

    def words(self) -> str:
        """All that it has said."""
        return self.output.read_text(errors="replace")

    def stop(self) -> None:
        """Kill it with all that it has started, also what has a session of its own."""
        with contextlib.suppress(psutil.Error):
            family = [*psutil.Process(self.process.pid).children(recursive=True), psutil.Process(self.process.pid)]
            for each in reversed(family):  # the oldest first: it would call the loss of a child a failure
                with contextlib.suppress(psutil.Error):
                    each.kill()
        self.process.wait()


def pytest_words(*words: str) -> list[str]:
    """A pytest of the long forms, that leaves no cache behind."""
    return [sys.executable, "-m", "pytest", "--long", "-m", "long", "-p", "no:cacheprovider", *words]


def surroundings(rows: Path) -> dict[str, str]:
    """One thread each: there are as many processes as cores. The package is found where it is not installed."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "OMP_NUM_THREADS": "1", ROWS: str(rows), COMMIT: commit(), "PYTHONPATH": path}


def collected(where: list[str], chosen: str) -> list[str]:
    """The names of all parts, the longest first."""
    words = pytest_words("--collect-only", *(["-k", chosen] if chosen else []), *where)
    told = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    tests = [line for line in told.stdout.splitlines() if "::" in line and " " not in line.partition("::")[0]]
    if told.returncode != 0 or not tests:
        raise SystemExit(f"no long tests were found\n{told.stdout}{told.stderr}")
    return sorted(tests, key=lambda test: next((n for n, word in enumerate(LONGEST) if word in test), len(LONGEST)))


def start(test: str, number: int, place: Path) -> Job:
    """Begin a part."""
    folder = place / f"job-{number}"
    folder.mkdir()
    rows, output = folder / "rows.json", folder / "output.txt"
    with output.open("wb") as file:
        process = subprocess.Popen(
            pytest_words("-rs", "--basetemp", str(folder / "tmp"), test),
            cwd=ROOT, env=surroundings(rows), stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip
    return Job(test, process, rows, output, time.monotonic())


def run_all(tests: list[str], folder: Path, processes: int, over: Callable[[], bool], place: Path) -> dict[str, str]:
    """All parts, so many at a time, until `over()` says that the time is; gives how each ended."""
    ends, waiting, running = dict.fromkeys(tests, NOT_OVER), list(enumerate(tests)), list[Job]()
    try:
        while (waiting or running) and not over():
            while waiting and len(running) < processes:
                number, test = waiting.pop(0)
                running.append(start(test, number, place))
            time.sleep(0.1)
            for job in [job for job in running if job.process.poll() is not None]:
                running.remove(job)
                ends[job.test] = job.ended()
                keep(job, ends, folder)
                print(f"{ends[job.test]:8} {time.monotonic() - job.began:6.1f} s  {job.test}", flush=True)
    finally:
        for job in running:  # its rows are left out: the clock stopped it, it has neither passed nor failed
            job.stop()
            keep(job, ends, folder)
    return ends


def keep(job: Job, ends: dict[str, str], folder: Path) -> None:
    """Put what a part has counted, and its words if it did not pass, beside those of the others."""
    if ends[job.test] in (PASSED, FAILED):
        put(rows_of(job.rows), folder / "rows.json")
    if ends[job.test] != PASSED:
        with (folder / "output.txt").open("a") as file:
            file.write(f"===== {ends[job.test]}: {job.test}\n{job.words()[-8000:]}\n")
    told = {**rows_of(folder / "jobs.json"), job.test: ends[job.test]}
    write_rows(told, folder / "jobs.json")


def summary(folder: Path, ends: dict[str, str]) -> list[str]:
    """What was counted in all, and what is missing."""
    whole, missing = add_up(rows_of(folder / "rows.json"))
    lines = [f"{name}: {row['result']} {json.dumps(row['counts'])}" for name, row in sorted(whole.items())]
    lines += [f"MISSING {each}" for each in missing]
    lines += [f"{end.upper()} {test}" for test, end in ends.items() if end != PASSED]
    return lines


def main() -> None:
    """Parse the words, run, tell; the exit code is 0 if every part has passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where rows.json, jobs.json, output.txt go")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="at a time; default: one a core")
    parser.add_argument("--seconds", type=float, default=7200, help="what is not over by then is stopped; default 7200")
    parser.add_argument("-k", dest="chosen", default="", metavar="WORDS", help="as with pytest: only these")
    parser.add_argument("--tests", nargs="+", default=[str(HERE)], metavar="PATH", help="default: tests/reliability")
    parser.add_argument("--rest", action="store_true", help="only what jobs.json of FOLDER does not call passed")
    parser.add_argument("--merge", action="store_true", help="then put the sums into docs/results/reliability.json")
    words = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what runs is stopped with this
    folder: Path = words.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if not words.rest:
        for name in ("rows.json", "jobs.json", "output.txt"):
            (folder / name).unlink(missing_ok=True)
    before = rows_of(folder / "jobs.json")
    begin = time.monotonic()
    tests = [test for test in collected(words.tests, words.chosen) if before.get(test) != PASSED]
    print(f"{len(tests)} parts to run, {words.processes} at a time, commit {commit()}", flush=True)
    with tempfile.TemporaryDirectory(prefix="m1clip-long-", ignore_cleanup_errors=True) as place:
        over = lambda: time.monotonic() - begin > words.seconds  # noqa: E731
        ends = run_all(tests, folder, words.processes, over, Path(place))
    for line in summary(folder, ends):
        print(line)
    passed = sum(end == PASSED for end in ends.values())
    print(f"{passed} of {len(tests)} parts passed in {time.monotonic() - begin:.0f} s")
    if words.merge and (folder / "rows.json").exists():
        merge([folder / "rows.json"], FILE)
        reliability_table.main()
    # One that cannot run here is skipped, and that is no failure.
    sys.exit(any(end in (FAILED, NOT_OVER) for end in ends.values()))


if __name__ == "__main__":
    main()
