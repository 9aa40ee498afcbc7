"""Settings for all tests: one torch thread, the same hypothesis examples each time, a temporary cache folder."""

import os

# Read when torch is loaded, also by the processes that tests start. Threads that wait for another one
# sleep instead of spinning: beside other processes, spinning makes small matmuls ten times slower.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

import atexit
import gc
import logging
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from small_run import Command

from m1clip.hardware import choices
from m1clip.hardware.machine_info import read_machine_info
from m1clip.inference.torch_encoder import fastest_precision

sys.path.append(str(Path(__file__).parent / "reliability"))
gc.disable()  # while tests are collected
settings.register_profile("m1clip", derandomize=True, deadline=None, database=None)
settings.load_profile("m1clip")
torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # which `make test &` in a script ignores

# xdist's workers inherit the folder from the first process, so that they share the cached
# measurements.
if "M1CLIP_TEST_CACHE" not in os.environ:
    folder = tempfile.mkdtemp(prefix="m1clip-test-cache-")
    os.environ |= {
        "M1CLIP_TEST_CACHE": folder,
        "XDG_CACHE_HOME": folder,
        "XDG_DATA_HOME": f"{folder}/data",
    }
    atexit.register(shutil.rmtree, folder, ignore_errors=True)

MANY_MODULES = 50  # a test that imports more has made garbage collection slow for those that follow
LONG_TESTS: list[dict[str, Any]] = []
FACTS = read_machine_info()


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--long` and `--record`, as used by `make test-long`."""
    parser.addoption("--long", action="store_true", help="also run the tests with large counts")
    parser.addoption(
        "--record",
        action="store_true",
        help="write the counts of the long tests to docs/reliability.md",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--long"):
        for item in items:
            if "long" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs pytest --long, or make test-long"))


def pytest_collection_finish() -> None:
    """Leave what is alive now out of garbage collection: each run calls gc.collect, which is slow with 10^6 objects."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture
def counts(request: pytest.FixtureRequest) -> dict[str, float]:
    """Counts that a test marked `long(promise)` reports to docs/reliability.md."""
    counted: dict[str, float] = {}
    promise = request.node.get_closest_marker("long").args[0]
    request.node.user_properties += [("promise", promise), ("counts", counted)]
    return counted


@pytest.fixture(autouse=True)
def _clean_process() -> Iterator[None]:
    """One thread again, since OpenMP hangs in a forked child.

    End what a failed test has left running.
    """
    torch.set_num_threads(1)
    _keep_precision()
    logger = logging.getLogger("m1clip")
    before = (list(logger.handlers), logger.level, logger.propagate)
    modules = len(sys.modules)
    yield
    if len(sys.modules) > modules + MANY_MODULES:
        gc.collect()
        gc.freeze()
    logger.handlers[:], level, logger.propagate = before
    logger.setLevel(level)  # also clears the cache of enabled levels
    while Command.started:
        Command.started.pop().send_signal(signal.SIGKILL, group=True)


def _keep_precision() -> None:
    """A kept choice, as if this machine had measured it: numbers would differ between machines otherwise."""
    # A test with a cache folder of its own has measured, and the process would remember that.
    fastest_precision.cache_clear()
    path = choices.folder() / f"matmul-cpu-{FACTS.torch}.json"
    if not path.exists():
        choices.save(path, "matmuls in the tests", "fp32", {"cpu": FACTS.cpu, "precision": "fp32"})


@pytest.fixture(autouse=True, scope="session")
def _short_timings() -> None:
    """An export measures speeds for seconds; in a test one round will do."""
    from m1clip.export import parity

    parity.TIMING_SECONDS = 0.0


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Collect the counts; with xdist, this runs in the main process."""
    if report.when == "call" and report.user_properties:
        LONG_TESTS.append(
            {"name": report.nodeid, "outcome": report.outcome, **dict(report.user_properties)}
        )


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the counts if --record is given; not in an xdist worker."""
    if session.config.getoption("--record") and not hasattr(session.config, "workerinput"):
        from record import record

        record(LONG_TESTS)
