"""The settings of a run as options of a command.

Names, types, help texts and defaults come from m1clip.config.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from cyclopts import App, Group, Parameter, Token

import m1clip.config
from m1clip.cli.app import app as m1clip_app
from m1clip.config import COMMON, DESCRIBED, NAMES, SECTIONS, Config, recipe_defaults
from m1clip.formatting import number

if TYPE_CHECKING:
    from rich.console import Console

Command = TypeVar("Command", bound=Callable[..., None])
# The part of --help for each section of the settings.
GROUPS = {
    "": COMMON,
    "model": Group("Model", sort_key=1),
    "data": Group("Data", sort_key=2),
    "optim": Group("Optimizer", sort_key=3),
    "train": Group("Training", sort_key=4),
    "transfer": Group("Transfer", sort_key=5),
}
POSITIONAL = "data"  # m1clip train photos


def with_settings(
    names: Collection[str] = NAMES, recipe: str | None = None, common: Collection[str] | None = None
) -> Callable[[Command], Command]:
    """Give a command that takes `**settings` one option per setting, or those of `names`.

    Cyclopts reads the options from the signature, and calls the command with those that the user
    typed. A command with one `recipe` shows only the defaults of this one. With `common`, --help
    shows these options only; `print_all_options` prints the others too.
    """

    def decorate(command: Command) -> Command:
        own = inspect.signature(command).parameters.values()
        own_options = [parameter for parameter in own if parameter.kind is parameter.KEYWORD_ONLY]
        options = [*setting_parameters(names, recipe), *own_options]
        if common is not None:
            options = [_show_option(option, option.name in common) for option in options]
        parameters = sorted(options, key=lambda parameter: parameter.kind)
        _set_signature(command, parameters)
        return command

    return decorate


def print_all_options(
    command: Callable[..., None], name: str, details: str, console: Console | None = None
) -> None:
    """Print the help of a command with every option, and with `details` at the end."""

    def complete(**settings: Any) -> None:
        """Stand in for the command: only its help is read."""

    complete.__doc__ = command.__doc__
    parameters = inspect.signature(command).parameters.values()
    # Settings that only a file can set stay hidden.
    options = [parameter for parameter in parameters if _is_parsed(parameter)]
    _set_signature(complete, [_show_option(parameter, True) for parameter in options])
    app = App(
        name=name,
        usage=m1clip_app[name.split()[-1]].usage,
        help_flags=(),
        version_flags=(),
        help_epilogue=details,
        console=console or m1clip_app.console,
    )
    app.default(complete)
    app.help_print([])


def _show_option(parameter: inspect.Parameter, show: bool) -> inspect.Parameter:
    """The same parameter, shown in --help or not."""
    hint: Any = parameter.annotation
    return parameter.replace(annotation=Annotated[hint, Parameter(show=show)])


def _is_parsed(parameter: inspect.Parameter) -> bool:
    """Whether the command line sets a parameter."""
    metadata = getattr(parameter.annotation, "__metadata__", ())
    return not any(isinstance(value, Parameter) and value.parse is False for value in metadata)


def _set_signature(command: Callable[..., None], parameters: list[inspect.Parameter]) -> None:
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}


def setting_parameters(
    names: Collection[str] = NAMES, recipe: str | None = None
) -> Iterator[inspect.Parameter]:
    """One parameter per setting; the settings check the values, as they do for Python and TOML."""
    texts = help_texts()
    kinds = (Config, *SECTIONS.values())
    hints = {kind: typing.get_type_hints(kind, include_extras=True) for kind in kinds}
    for name in names:
        section, key = NAMES[name]
        kind = SECTIONS.get(section, Config)
        hint = hints[kind][key]
        base = typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint
        metadata = getattr(hint, "__metadata__", ())
        option = Parameter(
            help=texts[kind.__name__, key],
            # Called for --help only.
            show_default=functools.partial(default_text, name, recipe=recipe),
            converter=None if base is bool else plain_value,
        )
        positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
        yield inspect.Parameter(
            name,
            positional if name == POSITIONAL else inspect.Parameter.KEYWORD_ONLY,
            default=getattr(kind, key),
            annotation=Annotated[base, Parameter(group=GROUPS[section]), *metadata, option],
        )


def plain_value(hint: Any, tokens: Sequence[Token]) -> Any:
    """What a TOML file would contain instead of this text: a list, a number, or the text."""
    if typing.get_origin(hint) is tuple:
        return [token.value for token in tokens]
    text = tokens[0].value
    kinds = (hint, *typing.get_args(hint))
    if int not in kinds and float not in kinds:
        return text
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


@functools.cache
def help_texts() -> dict[tuple[str, str], str]:
    """(class, field) -> the text under the field in config.py, and the choices of a table."""
    tree = ast.parse(inspect.getsource(m1clip.config))
    texts = {}
    for section in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for field, text in zip(section.body, section.body[1:], strict=False):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                    value=ast.Constant(value=str(words))
                ):
                    texts[section.name, name] = " ".join([words, *_choices_text(name)])
    return texts


def _choices_text(name: str) -> list[str]:
    """What the choices of a setting mean, if they are a table."""
    if name not in DESCRIBED:
        return []
    choices = [f"{choice}: {meaning}" for choice, meaning in DESCRIBED[name].items()]
    return ["; ".join(choices) + "."]


def default_text(name: str, default: Any = None, recipe: str | None = None) -> str | None:
    """The default of a setting, followed by those of recipes with another value; or that of a `recipe`.

    --init is listed if it differs from finetune. Cyclopts gives the `default` of the signature,
    which is not needed here.
    """
    values = recipe_defaults(name)
    if all(value in (None, ()) for value in values.values()):
        return None  # not shown
    if recipe is not None:
        return _as_text(values[recipe])
    usual, finetune, init = values["scratch"], values["finetune"], values["--init"]
    shown = [_as_text(usual)]
    for recipe in ("frozen", "finetune"):
        if values[recipe] != usual:
            shown.append(f"{recipe}: {_as_text(values[recipe])}")
    if init != finetune:
        shown.append(f"--init: {_as_text(init)}")
    return "; ".join(shown)


def _as_text(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(value)
    return number(value) if isinstance(value, float) else str(value)


def command_words(options: Mapping[str, Any]) -> list[str]:
    """The words that give a command these options, by name; None is not given."""
    words: list[str] = []
    for name, value in options.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        elif isinstance(value, list):
            words += [f"--{option}={item}" for item in value]
        elif value is not None:
            words.append(f"--{option}={value}")
    return words
