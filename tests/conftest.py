"""Settings for all tests: one torch thread, the same hypothesis examples each time, a cache folder that goes away."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

import pytest
import torch
from hypothesis import settings

settings.register_profile("m1clip", derandomize=True, deadline=None, database=None)
settings.load_profile("m1clip")
torch.set_num_threads(1)

# Made by the first process, which the workers of xdist inherit it from: what one has measured, the others need not.
if "M1CLIP_TEST_CACHE" not in os.environ:
    folder = tempfile.mkdtemp(prefix="m1clip-test-cache-")
    os.environ |= {"M1CLIP_TEST_CACHE": folder, "XDG_CACHE_HOME": folder}
    atexit.register(shutil.rmtree, folder, ignore_errors=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--long`: also the tests of hours and of large counts (make test-long)."""
    parser.addoption(
        "--long", action="store_true", default=bool(os.environ.get("M1CLIP_LONG")), help=pytest_addoption.__doc__
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the long forms out unless they are asked for."""
    if not config.getoption("--long"):
        for item in items:
            if "long" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="a long form: pytest --long, or make test-long"))
