"""The door: words in, exit code out; a person's mistake is one line."""

from __future__ import annotations

import io
import os
import platform
import sys
import traceback
from typing import NoReturn

from cyclopts import CycloptsError, UnusedCliTokensError

from m1clip.arguments import layers, spelled_out
from m1clip.commands import app, checkpoints, datasets, machine, models, training, watching
from m1clip.errors import UserError

FAMILIES = (
    training,
    checkpoints,
    datasets,
    models,
    watching,
    machine,
)  # importing a family puts its commands into the table
INTERRUPTED = 130  # the shell's code for Ctrl-C


def main(argv: list[str] | None = None) -> NoReturn:
    """Run a command; a person's mistake is one line and exit code 2, never a traceback (unless --debug)."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")  # in an ASCII locale, "?" for what it cannot show
    try:
        words = spelled_out([word for word in words if word != "--debug"])
        if not {"--help", "-h", "--version"} & set(words):
            _set_environment()
        app.config = layers(words)
        app(words, exit_on_error=False, print_error=False)
    except (UserError, CycloptsError) as error:
        if debug:
            traceback.print_exc()
        hint = ""
        if isinstance(error, UnusedCliTokensError) and words[0] == "train":
            hint = " Name your images right after train, or with --data."
        print(f"m1clip: {_one_line(error)}{hint}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if isinstance(error, BrokenPipeError):  # the reader of a pipe, such as head, has left
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
        if debug:
            traceback.print_exc()
        where = f"{error.filename}: " if error.filename else ""
        print(f"m1clip: {_one_line(where + (error.strerror or str(error)))}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("m1clip: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    sys.exit(0)


def _set_environment() -> None:
    """torch reads these once, when it is imported; no command has imported it yet."""
    from m1clip.hardware.device import environment

    os.environ.update(environment(platform.system(), os.environ))


def _one_line(error: Exception | str) -> str:
    return " ".join(str(error).split())
