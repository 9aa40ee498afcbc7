"""The app that all commands register with. Each command imports what it needs when called, so --help stays fast."""

from collections.abc import Sequence
from typing import Annotated, Any

from cyclopts import UNSET, App, ArgumentCollection, Parameter
from cyclopts.validators import Number

from m1clip import __version__
from m1clip.errors import UserError


def reject_empty_values(app: App, names: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Raise UserError for an option with an empty value; cyclopts calls this before a command."""
    for argument in arguments:
        for token in argument.tokens:
            if token.value == "" and token.implicit_value is UNSET:
                name = token.keyword or argument.name
                hint = "(an unset shell variable?); use '.' for the current folder"
                raise UserError(f"{name}: the value is empty {hint}")


app = App(
    name="m1clip",
    version=__version__,
    help="Train CLIP on the computer you have. Every command takes --help, and --debug to show a full traceback.",
    config=reject_empty_values,
    suppress_keyboard_interrupt=False,  # main reports it
)


def _integer(hint: Any, tokens: Sequence[Any]) -> int:
    """Cyclopts would read 1.5 as 1."""
    try:
        return int(tokens[0].value)
    except ValueError:
        raise UserError(f"{tokens[0].keyword} {tokens[0].value}: expected an integer") from None


Flag = Annotated[bool, Parameter(negative="", show_default=False)]
Count = Annotated[int, Parameter(validator=Number(gte=1), converter=_integer)]
