"""The app that all commands register with. Each command imports what it needs when called, so --help stays fast."""

from collections.abc import Sequence
from typing import Annotated, Any

from cyclopts import UNSET, App, ArgumentCollection, Group, Parameter
from cyclopts.validators import Number

from m1clip import __version__
from m1clip.errors import DOCS_URL, UserError


def reject_empty_values(app: App, names: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Raise UserError for an option with an empty value; cyclopts calls this before a command."""
    for argument in arguments:
        for token in argument.tokens:
            if token.value == "" and token.implicit_value is UNSET:
                name = token.keyword or argument.name
                hint = "(an unset shell variable?); use '.' for the current folder"
                raise UserError(f"{name}: the value is empty {hint}")


# The groups of commands in m1clip --help, each with an example.
START_HERE = Group("Start", "m1clip demo, then m1clip train photos --minutes 10", sort_key=1)
PHOTOS = Group(
    "Photos", 'm1clip index ~/Pictures, then m1clip search "a dog on a beach"', sort_key=2
)
RUNS = Group("Runs", "m1clip monitor, or m1clip report runs/demo", sort_key=3)
MODELS = Group("Models", "m1clip models, or m1clip eval runs/demo", sort_key=4)
DATA = Group("Data", "m1clip data lint photos", sort_key=5)
MACHINE = Group("Machine", "m1clip doctor, or m1clip compare", sort_key=6)
OPTIONS = Group("Options", sort_key=7)

app = App(
    name="m1clip",
    version=__version__,
    usage="Usage: m1clip COMMAND [ARGUMENTS] [OPTIONS]",
    help="Train CLIP on the computer you have, then use it.",
    help_epilogue=(
        "Every command has --help with examples; --debug shows a full traceback. Guides:"
        f" {DOCS_URL}"
    ),
    group_commands=OPTIONS,  # --help and --version; each command names its own group
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
Integer = Annotated[int, Parameter(converter=_integer)]
Count = Annotated[int, Parameter(validator=Number(gte=1), converter=_integer)]
Port = Annotated[int, Parameter(validator=Number(gte=0, lte=2**16 - 1), converter=_integer)]
