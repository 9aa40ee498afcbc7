"""Command-line entry point. A user error is printed as one line."""

import atexit
import contextlib
import errno
import gc
import io
import os
import platform
import signal
import sys
import threading
import traceback
from collections.abc import Mapping
from types import FrameType
from typing import NoReturn

from cyclopts import CycloptsError, UnknownOptionError, UnusedCliTokensError

from m1clip import console, time_use
from m1clip.cli import data, hub, machine, models, runs, search, train
from m1clip.cli.app import app
from m1clip.config import NAMES, OTHER_TOOLS
from m1clip.errors import UserError
from m1clip.formatting import most_similar, one_line

# Importing a module registers its commands.
FAMILIES = (train, runs, data, models, hub, search, machine)
app.register_install_completion_command()
OTHER_NAMES_OF_COUNT = dict.fromkeys(
    ("limit", "n", "top", "top_k", "topk", "max", "results"), "--count (-k)"
)
# Options of other tools for the data of a split, which has no option here.
DATA_OF_SPLIT = {
    f"{split}_{kind}"
    for split in ("val", "valid", "validation", "eval", "test")
    for kind in ("data", "dataset", "dir", "file", "set")
}
SPLIT_HINT = "Put a column split in the table, or name the tables train, val and test."
INTERRUPTED = 130  # exit code of shells for Ctrl-C
_leaving = threading.Event()  # set once the process is about to end


def main(argv: list[str] | None = None) -> NoReturn:
    """Run a command. A user error prints one line and exits with code 2; --debug adds the traceback."""
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        time_use.count_process()
        _open_standard_streams()
        signal.signal(signal.SIGINT, _on_interrupt)
        gc.set_threshold(10_000)  # imports create many objects, nearly all of which stay
        # Else the last collection looks at every object of torch, for 0.4 s.
        atexit.register(gc.freeze)
    debug = "--debug" in words
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")  # an ASCII locale prints "?" for other characters
    try:
        words = [word for word in words if word != "--debug"]
        if not {"--help", "-h", "--version"} & set(words):
            _set_environment()
        with console.on_stderr() if "--json" in words else contextlib.nullcontext():
            app(words, exit_on_error=False, print_error=False)
    except (UserError, CycloptsError) as error:
        if debug:
            traceback.print_exc()
        notes = getattr(error, "__notes__", [])
        report("\n".join([f"m1clip: {_message(error)}", *notes]))
        sys.exit(2)
    except OSError as error:
        if isinstance(error, BrokenPipeError):  # the reader of the pipe, such as head, has exited
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
        if debug:
            traceback.print_exc()
        report(f"m1clip: {_one_line(_describe_os_error(error))}")
        sys.exit(2)
    except KeyboardInterrupt as interrupt:
        hint = "".join(f"; {note}" for note in getattr(interrupt, "__notes__", []))
        report(f"m1clip: interrupted{hint}")
        sys.exit(INTERRUPTED)
    finally:
        _leaving.set()
    sys.exit(0)


def report(message: str) -> None:
    """Print why the command ends."""
    print(message, file=sys.stderr)
    console.tell_torchrun(message)


def _describe_os_error(error: OSError) -> str:
    """The file and what happened to it; on a full disk also what to do."""
    where = f"{error.filename}: " if error.filename else ""
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    hint = "; free some space, then run the command again" if is_full else ""
    return f"{where}{error.strerror or error}{hint}"


def _on_interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt once; a second Ctrl-C during cleanup exits without a traceback."""
    if _leaving.is_set():
        if sys.stdout.isatty():
            # Show the cursor again: progress bars hide it.
            os.write(sys.stdout.fileno(), b"\x1b[?25h")
        os._exit(INTERRUPTED)
    _leaving.set()
    raise KeyboardInterrupt


def _open_standard_streams() -> None:
    """Replace streams that the shell closed (>&-) with /dev/null, or the next open file would get their number."""
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(handle)
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def _set_environment() -> None:
    """Set the variables that torch reads at import time; no command has imported it yet."""
    from m1clip.hardware.machine_info import environment

    os.environ.update(environment(platform.system(), os.environ))


def _message(error: Exception) -> str:
    """The error on one line; for train, with the option that users of other tools look for."""
    command = list(error.command_chain or ()) if isinstance(error, CycloptsError) else []
    in_train = command == ["train"]
    if isinstance(error, UnusedCliTokensError) and in_train:
        hint = "Put all paths of your images after train, or use --data for all."
        return f"{_one_line(error)} {hint}"
    if isinstance(error, UnknownOptionError):
        name = _typed_option(error).lstrip("-").replace("-", "_")
        if command in (["train"], ["plan"]) and name in DATA_OF_SPLIT:
            return _one_line(f"Unknown option: {_typed_option(error)}. {SPLIT_HINT}")
        if command == ["demo"] and name.replace("-", "_") in NAMES:
            typed = _typed_option(error)
            hint = f"m1clip train --preset demo {typed} VALUE changes it."
            return _one_line(f"Unknown option: {typed}. {hint}")
        others = {"train": OTHER_TOOLS, "search": OTHER_NAMES_OF_COUNT}
        return _one_line(_unknown_option(error, others.get(" ".join(command), {})))
    return _one_line(error)


def _typed_option(error: UnknownOptionError) -> str:
    return (error.token.keyword or error.token.value).partition("=")[0]


def _unknown_option(error: UnknownOptionError, other_tools: Mapping[str, str]) -> str:
    """An unknown option, and the one that was meant, as far as a name can tell.

    `other_tools`: {the name of an option in other tools: that of the same option here}.
    """
    typed = _typed_option(error)
    name = typed.lstrip("-")
    # Some settings can be in config.toml only.
    options = [option for option in error.argument_collection if option.parse]
    names = [option_name for option in options for option_name in option.names]
    known_names = [
        option_name.removeprefix("--") for option_name in names if option_name.startswith("--")
    ]
    suggestion = other_tools.get(name.replace("-", "_"))
    one_dash = not typed.startswith("--")  # such as -x, or several: -xyz
    if one_dash and suggestion is None and name not in known_names:
        return str(error)
    if suggestion is None and (similar := most_similar(name, known_names)):
        suggestion = f"--{similar[0]}"
    return f"Unknown option: {typed}." + (f" Did you mean {suggestion}?" if suggestion else "")


def _one_line(error: Exception | str) -> str:
    return one_line(" ".join(str(error).split()))


if __name__ == "__main__":
    main()
