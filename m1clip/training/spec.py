"""RunSpec: a run with every value decided, as config.toml has it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self, get_args, get_origin, get_type_hints

from m1clip.config import (
    ALIASES,
    CHOSEN_BY,
    DURATIONS,
    NAMES,
    SECTIONS,
    Config,
    DataConfig,
    Section,
    TrainConfig,
    TransferConfig,
    from_dict,
    merge_config,
    nest_options,
    read_tables,
    read_toml,
    to_dict,
    to_toml,
)
from m1clip.data.augment import Augmentation
from m1clip.errors import UserError
from m1clip.hardware.device import Kind, Precision
from m1clip.training.duration import StepPlan, step_plan

# Who chose a value: the user (options or a file), a preset, a recipe, a rule, or a measurement on
# this machine. A value that is not listed is the default.
Origin = Literal["user", "preset", "recipe", "rule", "measurement"]
LENGTH = (
    "steps",
    "plan",
    "evaluations",
    "max_epochs",
)  # settings that make up the length of a decided run


class DecidedSection:
    """Base class of sections in which the fields that are listed have a final value."""

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]
        missing = [
            name
            for name, hint in final_types(type(self)).items()
            if not is_final(hint, getattr(self, name))
        ]
        assert not missing, f"not decided: {missing}"

    @classmethod
    def of(cls, section: Section) -> Self:
        """The same settings, which must be decided."""
        return cls(**vars(section))


@dataclass(frozen=True, kw_only=True)
class DecidedData(DecidedSection, DataConfig):
    captions_per_step: int = field()
    crop_min: float = field()
    flip: float = field()
    color_jitter: float = field()
    patch_dropout: float = field()
    word_dropout: float = field()
    mild_after: int = field()
    cutmix: float = field()


@dataclass(frozen=True, kw_only=True)
class DecidedTrain(DecidedSection, TrainConfig):
    minutes: None = None  # converted to steps
    epochs: None = None
    steps: int = field()
    batch_size: int = field()
    label_smoothing: float = field()
    text_contrast: float = field()
    device: Kind = field()
    precision: Precision = field()
    fsdp: Literal["on", "off"] = field()


@dataclass(frozen=True, kw_only=True)
class DecidedTransfer(DecidedSection, TransferConfig):
    recipe: Literal["scratch", "frozen", "finetune"] = field()


@dataclass(frozen=True, kw_only=True)
class DecidedConfig(Config):
    """All settings of a run, with a final value where `Config` allows None or auto.

    The decided sections list only what they narrow; everything else is as in `Config`. A setting
    that may still be None has no value in such a run, like `init` in a run from random weights.
    """

    data: DecidedData = field()
    train: DecidedTrain = field()
    transfer: DecidedTransfer = field()

    @classmethod
    def of(cls, config: Config) -> DecidedConfig:
        """The same settings as a decided config; they must be decided (`undecided` is empty)."""
        return cls(
            model=config.model,
            data=DecidedData.of(config.data),
            optim=config.optim,
            train=DecidedTrain.of(config.train),
            transfer=DecidedTransfer.of(config.transfer),
            seed=config.seed,
        )

    def as_config(self) -> Config:
        """The same settings as a config in which every setting can be opened again."""
        sections = {name: kind(**vars(getattr(self, name))) for name, kind in SECTIONS.items()}
        return Config(seed=self.seed, **sections)  # type: ignore[arg-type]


def final_types(kind: type) -> dict[str, Any]:
    """The type of each field that a decided section narrows."""
    hints = get_type_hints(kind)
    return {name: hints[name] for name in kind.__annotations__}


def is_final(hint: Any, value: Any) -> bool:
    """Whether a value has the type of a decided field."""
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    return isinstance(value, (int, float) if hint is float else hint)


# Flat name -> the type of its final value, for settings that have one in every run although users
# need not give one.
DECIDED: dict[str, Any] = {
    name: final_types(kind)[key]
    for name, (section, key) in NAMES.items()
    for kind in (get_type_hints(DecidedConfig).get(section),)
    if kind is not None and issubclass(kind, DecidedSection) and key in final_types(kind)
}


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
        return merge_config(self.options, self.tables)

    @cached_property
    def _all_tables(self) -> dict[str, Any]:
        return read_tables(self.file, self.preset)

    @cached_property
    def changed_run(self) -> Config | None:
        """The settings of the run whose config.toml is the file, if the options change
        any of them.
        """
        tables = self._all_tables
        if CHOSEN_BY not in tables:
            return None
        run = merge_config({}, tables)
        return None if merge_config(self.options, tables) == run else run

    @cached_property
    def tables(self) -> dict[str, Any]:
        """What the file or the preset gives below the options.

        The config.toml of a run has every value, so that it repeats the run. If the options change
        one, the file gives only what the user or a preset chose, and the number of steps: all other
        values may depend on what was changed, so they are decided again.
        """
        tables = self._all_tables
        if self.changed_run is None:
            return tables
        origins = read_origins(tables, str(self.file))
        values = flat_values(tables)
        kept_names = edited_values(values, origins)
        kept_names |= {name for name, origin in origins.items() if origin in ("user", "preset")}
        has_new_length = bool(chosen_names(self._flat_options) & set(DURATIONS))
        if origins.get("steps") != "recipe" and not has_new_length:
            kept_names |= set(LENGTH)
        return {
            **nest_options({name: values[name] for name in values if name in kept_names}),
            CHOSEN_BY: {name: origins[name] for name in origins if name in kept_names},
        }

    @cached_property
    def chosen_by(self) -> dict[str, Origin]:
        """Who chose each value that is not a default."""
        origins_by_name: dict[str, Origin] = {}
        for name in NAMES:
            if setting(self.config, name) != setting(Config(), name):
                # Unless one of those below gave it.
                origins_by_name[name] = "rule" if name == "recipe" else "recipe"
        written = flat_values(self.tables)
        if self.preset is not None:
            origins_by_name |= dict.fromkeys(chosen_names(written), "preset")
        elif CHOSEN_BY not in self.tables:
            origins_by_name |= dict.fromkeys(chosen_names(written), "user")
        else:
            origins = read_origins(self.tables, str(self.file))
            origins_by_name |= dict.fromkeys(edited_values(written, origins), "user")
            origins_by_name |= origins
        origins_by_name |= dict.fromkeys(chosen_names(self._flat_options), "user")
        return {
            name: origin
            for name, origin in origins_by_name.items()
            if setting(self.config, name) is not None
        }

    @property
    def _flat_options(self) -> dict[str, Any]:
        return {ALIASES.get(name, name): value for name, value in self.options.items()}

    @cached_property
    def flat(self) -> dict[str, Any]:
        """The settings of the options, over those of the file or the preset, by flat name."""
        return {**flat_values(self.tables), **self._flat_options}

    @property
    def specified(self) -> set[str]:
        """The flat names of the settings in the options, the file or the preset."""
        return {name for name, value in self.flat.items() if value is not None}

    def with_values(self, **options: Any) -> Settings:
        return dataclasses.replace(self, options={**self.options, **options})


@dataclass(frozen=True)
class DecidedSettings(Settings):
    """Complete settings, to which no recipe or preset adds anything: those of a saved run, or made
    in Python.
    """

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
    def specified(self) -> set[str]:
        return set(self.chosen_by)

    def with_values(self, **options: Any) -> Settings:
        origins = {**self.chosen_by, **dict.fromkeys(options, "user")}
        return DecidedSettings(complete=self.complete.with_values(**options), origins=origins)  # type: ignore[arg-type]


def chosen_names(values: Mapping[str, Any]) -> set[str]:
    """The settings with a value that is not left to m1clip, which None and `auto` are."""
    return {
        name
        for name, value in values.items()
        if value is not None and not (value == "auto" and name in DECIDED)
    }


def edited_values(values: Mapping[str, Any], origins: Mapping[str, Origin]) -> set[str]:
    """The settings of a run's config.toml that are no defaults, and that the run had not chosen."""
    defaults = flat_values(to_dict(Config()))
    return {
        name
        for name, value in values.items()
        if name not in origins and value != defaults.get(name)
    }


def flat_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of TOML tables by flat name; without what is not a setting."""
    flat_names = {path: name for name, path in NAMES.items()}
    values_by_name: dict[str, Any] = {}
    for section, table in values.items():
        if isinstance(table, dict):
            values_by_name |= {
                flat_names[section, key]: value
                for key, value in table.items()
                if (section, key) in flat_names
            }
        elif ("", section) in flat_names:
            values_by_name[flat_names["", section]] = table
    return values_by_name


@dataclass(frozen=True)
class RunSpec:
    """A run with every value decided, and who chose it.

    Saved as config.toml, which repeats the run.
    """

    config: DecidedConfig
    # By flat name; the others are defaults.
    chosen_by: Mapping[str, Origin] = field(default_factory=dict)
    measured: Mapping[str, Any] = field(default_factory=dict, compare=False)  # for the log

    @property
    def plan(self) -> StepPlan:
        return step_plan(self.config.train)

    def as_settings(self) -> DecidedSettings:
        return DecidedSettings(complete=self.config.as_config(), origins=self.chosen_by)

    def with_plan(self, plan: StepPlan) -> RunSpec:
        """The spec with another number of steps, which the clock of --minutes has corrected."""
        config = self.config.with_values(**plan.as_settings())
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
    return [name for name, hint in DECIDED.items() if not is_final(hint, setting(config, name))]


def augmentation_of(data: DecidedData) -> Augmentation:
    """The augmentation among the settings of the data."""
    names = [item.name for item in dataclasses.fields(Augmentation)]
    return Augmentation(**{name: getattr(data, name) for name in names})


def read_spec(run: Path) -> RunSpec:
    """The spec of a run folder; UserError if its config.toml is missing or incomplete."""
    path = run / "config.toml"
    if not run.exists():
        raise UserError(f"{run}: no such file or folder")
    if not path.is_file():
        raise UserError(f"{run}: not a run folder (no config.toml)")
    values = read_toml(path)
    config = from_dict(values, str(path))
    missing = undecided(config)
    if missing:
        section, key = NAMES[missing[0]]
        raise UserError(
            f"{path}: [{section}] {key} has no final value, so m1clip did not write this file;"
            f" start a new run with --config {path}"
        )
    return RunSpec(DecidedConfig.of(config), read_origins(values, str(path)))


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
