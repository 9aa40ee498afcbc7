"""The table of commands: one file a family. Each imports its room only when called, so that --help answers at once."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Group, Parameter
from cyclopts.validators import Number

from m1clip import __version__

app = App(
    name="m1clip",
    version=__version__,
    help="Train CLIP on the computer you have. Every command takes --help, and --debug to show a full traceback.",
    group_parameters=Group("All settings", sort_key=1),
    suppress_keyboard_interrupt=False,  # main says how to continue
)

Count = Annotated[int, Parameter(validator=Number(gte=1))]
