"""The app that all commands register with. Each command imports what it needs when called, so --help stays fast."""

from collections.abc import Sequence
from typing import Annotated, Any

from cyclopts import App, Parameter
from cyclopts.validators import Number

from m1clip import __version__
from m1clip.errors import UserError

app = App(
    name="m1clip",
    version=__version__,
    help="Train CLIP on the computer you have. Every command takes --help, and --debug to show a full traceback.",
    suppress_keyboard_interrupt=False,  # main reports it
)

words: list[str] = []  # the command line, set by main


def _integer(hint: Any, tokens: Sequence[Any]) -> int:
    """Cyclopts would read 1.5 as 1."""
    try:
        return int(tokens[0].value)
    except ValueError:
        raise UserError(f"{tokens[0].keyword} {tokens[0].value}: give an integer") from None


Flag = Annotated[bool, Parameter(negative="", show_default=False)]
Count = Annotated[int, Parameter(validator=Number(gte=1), converter=_integer)]
