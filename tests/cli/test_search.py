"""Commands that search photos, as their users see them."""

import subprocess
import sys
from pathlib import Path

from small_run import TIMEOUT, environment

CLOSED_WHILE_LOADING = """
import atexit, sys, threading
from m1clip.cli.main import main
from m1clip.web import photos, server

loading = threading.Event()

def warm_up(self):
    loading.set()
    threading.Event().wait()

photos.Photos.warm_up = warm_up
server.serve = lambda *_: loading.wait()  # until Ctrl-C
atexit.register(print, "Python ends its threads", flush=True)
main(["serve", sys.argv[1]])
"""


def test_serve_that_is_closed_while_it_loads_the_model_does_not_abort(tmp_path: Path) -> None:
    """Python would end the thread within torch, and the process with it ("terminate called")."""
    done = subprocess.run(
        [sys.executable, "-c", CLOSED_WHILE_LOADING, str(tmp_path)],
        env=environment(),
        check=False,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
