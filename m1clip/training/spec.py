"""RunSpec: a run with every value decided, as config.toml has it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from m1clip.config import (
    ALIASES,
    CHOSEN_BY,
    NAMES,
    Config,
    from_dict,
    make_config,
    read_preset,
    read_toml,
    to_toml,
)
from m1clip.data.augment import Augmentation
from m1clip.errors import UserError
from m1clip.training.duration import StepPlan, step_plan

# Who chose a value: the user (options or a file), a preset, a recipe, a rule, or a measurement on this machine.
# A value that is not listed is the default.
Origin = Literal["user", "preset", "recipe", "rule", "measurement"]
# Settings that have a value in every run, although users need not give one.
DECIDED = (
    *("batch_size", "captions_per_step", "text_contrast", "steps"),
    *(item.name for item in dataclasses.fields(Augmentation)),
)


def setting(config: Config, name: str) -> Any:
    """The value of a setting by its flat name, such as batch_size."""
    section, key = NAMES[name]
    return getattr(getattr(config, section) if section else config, key)


@dataclass(frozen=True)
class Settings:
    """What the user wrote: options, over a TOML file or a preset, over the values of a recipe."""

    options: Mapping[str, Any] = field(default_factory=dict)  # by flat name
    file: str | Path | None = None
    preset: str | None = None

    @cached_property
    def config(self) -> Config:
        return make_config(self.options, self.file, self.preset)

    @cached_property
    def chosen_by(self) -> dict[str, Origin]:
        """Who chose each value that is not a default."""
        found: dict[str, Origin] = {}
        for name in NAMES:
            if setting(self.config, name) != setting(Config(), name):
                # Unless one of those below gave it.
                found[name] = "rule" if name == "recipe" else "recipe"
        if self.preset is not None:
            found |= dict.fromkeys(flat_values(read_preset(self.preset)), "preset")
        if self.file is not None:
            values = read_toml(Path(self.file))
            found |= dict.fromkeys(flat_values(values), "user")
            # Of a run that is repeated: a value that is not listed is a default.
            if CHOSEN_BY in values:
                known = read_origins(values, str(self.file))
                found = {name: known[name] for name in found if name in known}
        given = [
            ALIASES.get(name, name) for name, value in self.options.items() if value is not None
        ]
        return found | dict.fromkeys(given, "user")

    @cached_property
    def flat(self) -> dict[str, Any]:
        """The settings of the options, over those of the file or the preset, by flat name."""
        values: dict[str, Any] = {}
        if self.file is not None:
            values = read_toml(Path(self.file))
        elif self.preset is not None:
            values = read_preset(self.preset)
        options = {ALIASES.get(name, name): value for name, value in self.options.items()}
        return {**flat_values(values), **options}

    @property
    def given(self) -> set[str]:
        """The flat names of the settings in the options, the file or the preset."""
        return {name for name, value in self.flat.items() if value is not None}

    def changed(self, **options: Any) -> Settings:
        return dataclasses.replace(self, options={**self.options, **options})


@dataclass(frozen=True)
class DecidedSettings(Settings):
    """Complete settings, to which no recipe or preset adds anything: those of a saved run, or made in Python."""

    complete: Config = field(default_factory=Config)
    origins: Mapping[str, Origin] | None = None  # None: the user chose what is not a default

    @cached_property
    def config(self) -> Config:
        return self.complete

    @cached_property
    def chosen_by(self) -> dict[str, Origin]:
        if self.origins is not None:
            return dict(self.origins)
        return {
            name: "user" for name in NAMES if setting(self.config, name) != setting(Config(), name)
        }

    @property
    def given(self) -> set[str]:
        return set(self.chosen_by)

    def changed(self, **options: Any) -> Settings:
        origins = {**self.chosen_by, **dict.fromkeys(options, "user")}
        return DecidedSettings(complete=self.complete.changed(**options), origins=origins)  # type: ignore[arg-type]


def flat_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of TOML tables by flat name; without what is not a setting."""
    flat = {place: name for name, place in NAMES.items()}
    found: dict[str, Any] = {}
    for section, table in values.items():
        if isinstance(table, dict):
            found |= {
                flat[section, key]: value for key, value in table.items() if (section, key) in flat
            }
        elif ("", section) in flat:
            found[flat["", section]] = table
    return found


@dataclass(frozen=True)
class RunSpec:
    """A run with every value decided, and who chose it. Saved as config.toml, which repeats the run."""

    config: Config  # without auto values; minutes and epochs are converted to steps
    # By flat name; the others are defaults.
    chosen_by: Mapping[str, Origin] = field(default_factory=dict)
    measured: Mapping[str, Any] = field(default_factory=dict, compare=False)  # for the log

    def __post_init__(self) -> None:
        missing = undecided(self.config)
        assert not missing, f"not decided: {missing}"

    @property
    def plan(self) -> StepPlan:
        plan = step_plan(self.config.train)
        assert plan is not None
        return plan

    @property
    def augmentation(self) -> Augmentation:
        return augmentation_of(self.config)

    def as_settings(self) -> DecidedSettings:
        return DecidedSettings(complete=self.config, origins=self.chosen_by)

    def with_plan(self, plan: StepPlan) -> RunSpec:
        """The spec with another number of steps, which the clock of --minutes has corrected."""
        config = self.config.changed(**plan.as_settings())
        chosen_by: dict[str, Origin] = {
            **self.chosen_by,
            "steps": "measurement",
            "plan": "measurement",
        }
        return dataclasses.replace(self, config=config, chosen_by=chosen_by)

    def to_toml(self) -> str:
        """The settings, and a table with who chose each."""
        names = [name for name in NAMES if name in self.chosen_by]
        lines = [f'{name} = "{self.chosen_by[name]}"' for name in names]
        return "\n".join([to_toml(self.config), f"[{CHOSEN_BY}]", *lines]) + "\n"


def undecided(config: Config) -> list[str]:
    """The settings of a config that a run needs and that have no final value."""
    missing = [name for name in DECIDED if setting(config, name) is None]
    missing += [
        name for name in ("device", "precision", "recipe") if setting(config, name) == "auto"
    ]
    missing += ["batch_size"] if config.train.batch_size == "auto" else []
    return missing + [name for name in ("minutes", "epochs") if setting(config, name) is not None]


def augmentation_of(config: Config) -> Augmentation:
    """The augmentation of a config that has it decided."""
    return Augmentation(
        **{item.name: getattr(config.data, item.name) for item in dataclasses.fields(Augmentation)}
    )


def read_spec(run: Path) -> RunSpec:
    """The spec of a run folder; UserError if its config.toml is missing or incomplete."""
    path = run / "config.toml"
    if not path.is_file():
        raise UserError(f"{run}: not a run folder (no config.toml)")
    values = read_toml(path)
    config = from_dict(values, str(path))
    missing = undecided(config)
    if missing:
        section, key = NAMES[missing[0]]
        raise UserError(
            f"{path}: [{section}] {key} has no final value, so m1clip did not write this file; start a new run with "
            f"--config {path}"
        )
    return RunSpec(config, read_origins(values, str(path)))


def read_origins(values: Mapping[str, Any], where: str) -> dict[str, Origin]:
    """The table of who chose each value; {} if there is none."""
    table = values.get(CHOSEN_BY, {})
    if not isinstance(table, dict):
        raise UserError(f"{where}: {CHOSEN_BY} must be a table")
    for name, origin in table.items():
        if name not in NAMES:
            raise UserError(f"{where}: {CHOSEN_BY} names the unknown setting '{str(name)[:80]}'")
        if origin not in get_args(Origin):
            raise UserError(
                f"{where}: {CHOSEN_BY}.{name} must be one of {', '.join(get_args(Origin))}"
            )
    return dict(table)
