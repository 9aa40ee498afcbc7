"""Entry point of the command, and of python -m m1clip."""

from __future__ import annotations

import os
import signal
from typing import NoReturn


def main() -> NoReturn:
    """Run the command; Ctrl-C while it is still being imported exits without a traceback."""
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))
    from m1clip.console import watch_imports

    watch_imports()
    from m1clip.cli.main import main as run_command

    run_command()


if __name__ == "__main__":
    main()
