"""The app that all commands register with. Each command imports what it needs when called, so --help stays fast."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter
from cyclopts.validators import Number

from m1clip import __version__

app = App(
    name="m1clip",
    version=__version__,
    help="Train CLIP on the computer you have. Every command takes --help, and --debug to show a full traceback.",
    suppress_keyboard_interrupt=False,  # main reports it
)

words: list[str] = []  # the command line, set by main
Count = Annotated[int, Parameter(validator=Number(gte=1))]
