"""Everything that a run needs on this machine, for every recipe: opened data, initial model,
device.

`Workbench` opens, loads and measures each thing once, when `resolve` or the run first needs it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from m1clip import console, time_use
from m1clip.config import Config
from m1clip.data.decoding import DecodeOptions, decode_options
from m1clip.data.prepare import Split, crop_margin, is_synthetic, quick_check
from m1clip.data.split_record import Record, keep_splits, read_splits, recorded_splits
from m1clip.data.types import Source
from m1clip.errors import UserError
from m1clip.formatting import plural
from m1clip.hardware.device import (
    HYBRIDS,
    Device,
    check_compile,
    choose_device,
    choose_precision,
    threads,
)
from m1clip.hardware.machine_info import read_machine_info
from m1clip.hardware.memory import keep_freed_memory
from m1clip.model import named
from m1clip.model.clip import CLIP, count_parameters
from m1clip.model.folder import check_exists
from m1clip.model.presets import clip_config
from m1clip.model.pretrained.packages import PACKAGES, installed, tower_parts
from m1clip.model.residual import add_residual, residual_kinds
from m1clip.text.tokenizers import CharTokenizer
from m1clip.training import hybrid
from m1clip.training.ahead import ModelAhead
from m1clip.training.batch_choice import largest_batch
from m1clip.training.calibration import calibrate
from m1clip.training.decision import (
    Dataset,
    InitialModel,
    Length,
    Machine,
    Measurements,
    MemoryFacts,
    TuningFacts,
)
from m1clip.training.device_choice import Choice, fastest
from m1clip.training.distributed import RankLost, Ranks
from m1clip.training.duration import Costs, TimeBudget
from m1clip.training.head_trial import (
    MOST_IMAGES,
    HeadCandidate,
    HeadStart,
    HeadTrial,
    Scores,
    choose_heads,
    copy_with_own_heads,
    general_heads,
    head_candidates,
    head_starts,
    never,
    run_trial,
    split_rows,
    trial_limit,
)
from m1clip.training.initial_model import InitialModelLoader, check_memory
from m1clip.training.inputs import ModelParts, RunInputs, seeded_build
from m1clip.training.memory import MemoryEstimate, estimate_memory, fits_one_gpu, memory_limit
from m1clip.training.recipe_choice import with_recipe
from m1clip.training.resolve import describe_device, resolve
from m1clip.training.spec import DecidedConfig, DecidedData, DecidedSettings, RunSpec, Settings
from m1clip.training.tower_choice import AUTO
from m1clip.training.training_data import (
    check_training_data,
    dataset_facts,
    longest_caption,
    make_training_set,
    read_data,
)
from m1clip.training.transfer import (
    ModelInit,
    fit_heads,
    fit_stem,
    load_features,
    load_teacher,
    open_feature_cache,
)
from m1clip.training.tuning import flops_per_second, model_size

TRIAL_EPOCHS = 8  # of a trial of the heads, unless the user gives --epochs
UNMEASURED_STEPS = 1000  # of a run while the number that fits in its time is measured


class Workbench:
    """Opens, loads and measures what a run is made of: each thing once, when it is first needed.

    With several ranks, rank 0 goes first, so that the others find what it has downloaded and
    cached; what it measures holds for all of them.
    """

    def __init__(
        self,
        ranks: Ranks | None = None,
        budget: TimeBudget | None = None,
        saved: Path | None = None,
        source: Source | None = None,
    ) -> None:
        """`saved` is the folder of a run that is resumed.

        `source` is the data if it is open already.
        """
        self.facts = read_machine_info()
        self.ranks = ranks or Ranks()
        self.budget = budget
        self.costs = Costs()  # of an evaluation and of what follows the last step, if calibrated
        self.model: CLIP | None = None  # built already, because it has frozen towers
        self._ahead: ModelAhead | None = None  # builds the model while images are decoded
        self._saved = saved
        self._source = source
        self._checked: Source | None = None  # the same, once it is checked
        self._models = InitialModelLoader(self.ranks, self._open, saved)
        self._text_tokens = 0  # of the longest caption
        self._splits: dict[str, Split] = {}
        self._inputs: tuple[ModelParts, RunInputs] | None = None  # with what they were made for
        self._record: dict[str, Any] = {}

    def resolve(self, settings: Settings) -> RunSpec:
        """Decide a run with what this machine measures."""
        try:
            settings = with_recipe(
                settings, lambda: self._dataset(settings.config), installed, self._tuning
            )
            self.ranks.on_all_ranks(lambda: self._check_before_data(settings.config))
            dataset = self._dataset(settings.config)
            return resolve(settings, dataset, self.machine())
        except RankLost:
            raise
        except UserError as error:
            if self.ranks.size > 1:
                self.ranks.abort(str(error))  # all ranks decide the same, and rank 0 reports it
            raise

    def reopen(self, spec: RunSpec) -> RunInputs:
        """What a run works with whose spec was decided before: nothing is decided or measured."""
        self.ranks.on_all_ranks(lambda: self._check_before_data(spec.config))
        self._parts(spec.config)
        console.print(describe_device(spec.config, self.machine()))
        return self.inputs(spec)

    def machine(self) -> Machine:
        """This machine, and the functions that measure."""
        measurements = Measurements(
            initial_model=self._initial_model,
            fastest=self._fastest,
            memory=self._memory,
            fits_one_gpu=self._fits_one_gpu,
            readable_images=self._readable_images,
            steps_in_time=self._steps_in_time,
            heads=self._heads,
            tuning=self._tuning,
        )
        facts = self.ranks.on_rank0(lambda: self.facts)
        return Machine(
            facts,
            measurements,
            self.ranks.size,
            is_installed=installed,
            has_gpu=lambda kind: Device(choose_device(kind, self.facts), self.facts).has_gpu,
            check_compile=check_compile,
        )

    def inputs(self, spec: RunSpec) -> RunInputs:
        """What a decided run works with."""
        parts = self._models.parts(spec.config)
        if self._inputs is None or self._inputs[0] is not parts:
            self._load(spec.config)
            self._inputs = parts, self._make_inputs(spec)
        measured = {**spec.measured, **self._record}
        decided = dataclasses.replace(spec, measured=measured)
        return dataclasses.replace(self._inputs[1], spec=decided)

    @staticmethod
    def _is_own(model_init: ModelInit) -> bool:
        """Whether a model starts from random weights, and a forward pass does not change it."""
        shape = model_init.config
        kinds = shape.image_tower.kind, shape.text_tower.kind
        return kinds == ("vit", "transformer") and not model_init.weights

    def initial_model(self, inputs: RunInputs) -> CLIP | None:
        """The initial model of a run, if it is built already."""
        ahead, self._ahead = self._ahead, None  # once: it will be trained
        if self.model is not None or ahead is None:
            return self.model
        return ahead.model_for(inputs.model.init)

    def _check_before_data(self, config: Config) -> None:
        """Report what is wrong without reading the data, which may take long."""
        choose_device(config.train.device, self.facts)
        transfer = config.transfer
        towers = [transfer.image_tower, transfer.text_tower] if transfer.recipe == "frozen" else []
        models = [name for name in (transfer.init, transfer.teacher) if name is not None]
        parts = [
            part
            for tower in towers
            if tower != AUTO
            for part in tower_parts(tower)
            if part not in PACKAGES
        ]
        for name in parts:
            named.resolve(name)  # a model of the Hub that is not on this computer
        for name in models:
            check_exists(name)
        if config.transfer.init is None and config.transfer.recipe == "scratch":
            check_memory(clip_config(config.model), self.facts)

    def _dataset(self, config: Config) -> Dataset:
        source = self._open(config)
        return self.ranks.on_rank0(lambda: dataset_facts(source, config))

    @time_use.count_as("data")
    def _open(self, config: Config) -> Source:
        """The data; a model to start from is read first, because that is faster."""
        if self._checked is not None:
            return self._checked
        size = self._models.image_size(config)
        if self._source is None:
            self._source = self.ranks.rank0_first(lambda: read_data(config, size))
        source = self._source
        record = self.ranks.on_rank0(lambda: self._recorded_splits(config))
        if (moved := keep_splits(source, record).total()) and self._saved is None:
            images = plural(moved, "image")
            console.print(
                f"splits     {images} stay in the split that {config.transfer.init} had them in"
            )
        self.ranks.on_all_ranks(lambda: check_training_data(source, config))
        self._checked = source
        return source

    def _recorded_splits(self, config: Config) -> Record:
        """The splits of the run that is resumed, or of that whose model this run starts from."""
        if self._saved is not None:
            return read_splits(self._saved)
        init = config.transfer.init
        return {} if init is None else recorded_splits(init, config.data.source)

    def _tuning(self, config: Config) -> TuningFacts:
        """The model of --init and this machine, as far as they decide what of the model
        is trained.
        """
        device = self._device(config)
        shape = self._models.saved(config).config
        size = model_size(shape, count_parameters(shape))

        def measure() -> TuningFacts:
            limit = memory_limit(config, device, self.facts)
            cores = config.train.threads or self.facts.performance_cores
            return TuningFacts(limit, flops_per_second(device.kind, cores), size)

        return self.ranks.on_rank0(measure)

    def _parts(self, config: Config) -> ModelParts:
        """The initial model; at first, also a quick check of the data for it."""
        parts = self._models.parts(config)
        if self._text_tokens == 0:
            source = self._open(config)
            context_length = parts.init.config.context_length
            self.ranks.on_all_ranks(lambda: _check_device(config, parts.init))
            if not is_synthetic(config.data):
                with time_use.part("checks"):
                    self._record["lint"] = self.ranks.on_rank0(
                        lambda: quick_check(source, context_length)
                    )
            self._text_tokens = longest_caption(source, parts.tokenizer, context_length)
        return parts

    def _initial_model(self, config: Config) -> InitialModel:
        parts = self._parts(config)
        return InitialModel(
            parts.init.config,
            parts.init.trainable,
            is_pretrained=bool(parts.init.weights),
            new_heads=parts.init.new_heads,
            char_tokens=isinstance(parts.tokenizer, CharTokenizer),
        )

    @time_use.count_as("checks")
    def _fastest(self, config: Config) -> Choice:
        torch.set_num_threads(threads(config.train.threads, self.facts))
        model_init = self._parts(config).init
        tokens = self._text_tokens
        return self.ranks.on_rank0(lambda: fastest(config, model_init, self.facts, tokens))

    @time_use.count_as("checks")
    def _memory(self, config: Config) -> MemoryFacts:
        model_init = self._parts(config).init
        source = self._open(config)
        images = 0 if source.streamed else len(source.samples("train"))
        device = self._device(config)
        estimate = estimate_memory(
            config, model_init, self.facts, device, self._text_tokens, images
        )
        limit = self.ranks.on_rank0(lambda: memory_limit(config, device, self.facts))
        return MemoryFacts(
            limit, estimate if self.ranks.size == 1 else Rank0Estimate(estimate, self.ranks)
        )

    def _fits_one_gpu(self, config: Config, rows: int) -> bool:
        model_init = self._parts(config).init
        device = self._device(config)
        return self.ranks.on_rank0(
            lambda: fits_one_gpu(config, model_init, self.facts, device, rows)
        )

    def _readable_images(self, config: Config) -> int:
        self._load(config)
        count = len(self._splits["train"].samples)
        self.ranks.check_same({"the number of training images": count})
        return count

    @time_use.count_as("checks")
    def _steps_in_time(self, config: Config) -> Length:
        assert config.train.minutes is not None
        budget = self._budget(config.train.minutes)
        # The steps are what is measured: until then, any number that is more than the warmup.
        unmeasured = config.with_values(
            minutes=None, steps=UNMEASURED_STEPS + int(config.optim.warmup)
        )
        inputs = self.inputs(RunSpec(DecidedConfig.of(unmeasured)))
        calibration = calibrate(inputs, budget)
        steps, evaluations, self.costs = self.ranks.on_rank0(
            lambda: (calibration.steps, calibration.evaluations, calibration.costs)
        )
        return Length(steps, evaluations)

    @time_use.count_as("checks")
    def _heads(self, config: Config, lr: float | None) -> HeadTrial:
        """Choose how heads on cached features are trained, on a part of the training images."""
        self._load(config)
        train = self._splits["train"]
        model_init = self._parts(config).init
        adapters = () if model_init.new_heads else residual_kinds(self.frozen_model.image_head)
        if adapters and config.transfer.adapter != "auto":
            adapters = (config.transfer.adapter,)
        starts: tuple[HeadStart, ...] = ()
        if model_init.new_heads:
            starts = head_starts(config, model_init.config, len(train.samples))
        rows, held_out = split_rows(len(train.samples), config.seed)
        minutes = config.train.minutes
        is_late = never if minutes is None else trial_limit(self._budget(minutes))

        def trial(candidate: HeadCandidate) -> Scores:
            splits = {
                "train": train.subset_of_features(rows),
                "val": train.subset_of_features(held_out),
            }
            spec = RunSpec(_trial_config(config, candidate, len(rows)))
            model = copy_with_own_heads(self.frozen_model)
            inputs = self._make_inputs(spec, splits, model)
            return run_trial(inputs, model, is_late)

        def choose() -> HeadTrial:
            candidates = head_candidates(adapters, starts, lr)
            if model_init.new_heads and len(train.samples) >= MOST_IMAGES:
                usual = f"as measured on {plural(MOST_IMAGES, 'image')} or more"
                return HeadTrial(candidates[0], usual)
            with console.progress("trying ways to train the heads"):
                return choose_heads(candidates, len(train.samples), trial, is_late)

        return self.ranks.on_rank0(choose)

    def _budget(self, minutes: float) -> TimeBudget:
        """The clock of the command, or one that starts now."""
        return self.budget or TimeBudget(60 * minutes)

    @property
    def frozen_model(self) -> CLIP:
        """The initial model, which is built because its towers are frozen."""
        assert self.model is not None
        return self.model

    def _device(self, config: Config) -> Device:
        return Device(choose_device(config.train.device, self.facts), self.facts)

    def _decoding(self, device: Device) -> DecodeOptions:
        return decode_options(self.facts, device.kind)

    def _load(self, config: Config) -> None:
        """Cache the images of all splits, or the features of frozen towers."""
        if not self._splits:
            torch.set_num_threads(threads(config.train.threads, self.facts))
            self._parts(config)
            self._splits = self.ranks.rank0_first(lambda: self._load_splits(config))
            self._record["cache"] = {name: split.cache for name, split in self._splits.items()}

    @time_use.count_as("decoding")
    def _load_splits(self, config: Config) -> dict[str, Split]:
        parts = self._parts(config)
        model_init = parts.init
        source = self._open(config)
        device = self._device(config)
        precision = choose_precision(config.train.precision, device.name, self.facts)
        is_frozen = not all(model_init.trainable)
        if device.kind == "cpu" and is_frozen:
            keep_freed_memory()  # every batch of features needs the same blocks
        if is_frozen:
            self.model = seeded_build(model_init, config.seed)
        elif device.kind == "cuda" and self._is_own(model_init) and config.train.fsdp != "on":
            is_captured = config.model.cuda_graph and self.ranks.size == 1
            self._ahead = ModelAhead(
                model_init, config, device, precision, self._text_tokens, is_captured
            )
        cache = open_feature_cache(
            self.model, parts, config, source, device, precision, self._decoding(device)
        )
        if is_frozen:
            self._record["features"] = str(cache.folder)
        # Else not measured.
        own_files = model_init.config.image_tower.kind == "vit" and not is_synthetic(config.data)
        samples = source.sampled("train") if own_files else ()
        crop_min = DecidedData.of(config.data).crop_min
        margin = crop_margin(crop_min, parts.preprocess.image_size, samples)
        margins = {"train": margin, "val": 1.0, "test": 1.0}
        splits = {
            name: load_features(cache, config, source, name, model_init, margin)
            for name, margin in margins.items()
            if name in source.splits()
        }
        if self._ahead is not None:
            self._ahead.wait_until_built()
        return splits

    def _make_inputs(
        self, spec: RunSpec, splits: dict[str, Split] | None = None, model: CLIP | None = None
    ) -> RunInputs:
        """Of a run.

        Or of a trial on parts of its data, with a copy of the initial model and without other
        ranks.
        """
        is_trial = splits is not None
        splits = self._splits if splits is None else splits
        config = spec.config
        source = self._open(config)
        device = self._device(config)
        train = splits["train"]
        model = self.model if model is None else model
        parts = self._parts(config)
        model_init = self._fit_init(parts, train, config, model)
        teacher = None
        if config.transfer.teacher is not None:
            precision = choose_precision(config.train.precision, device.name, self.facts)
            teacher = self.ranks.rank0_first(
                lambda: load_teacher(
                    config, source, train, device, precision, self._decoding(device)
                )
            )
            temperature = 1 / teacher.scale
            console.print(
                f"teacher    {config.transfer.teacher}: half of the loss, temperature {temperature:.3f}"
            )
        inputs = RunInputs(
            spec=spec,
            facts=self.facts,
            device=device,
            model=parts._replace(init=model_init),
            source=source,
            training=make_training_set(
                config, train, device, model_init.config.image_tower.patches
            ),
            splits=splits,
            teacher=teacher,
        )
        if is_trial:
            return inputs
        if self.ranks.size > 1:
            self.ranks.check_same({"the hash of their captions": source.fingerprint(train.samples)})
        return inputs.for_rank(self.ranks)

    def _fit_init(
        self, parts: ModelParts, train: Split, config: DecidedConfig, model: CLIP | None
    ) -> ModelInit:
        """The initial model with heads or a stem that are fitted to the training images, or with
        adapters.

        `model` is the initial model, if it is built already.
        """
        model_init = parts.init
        adapter = config.transfer.adapter
        if adapter != "auto" and model_init.adapter is None:  # decided after the model was built
            assert model is not None
            for head in (model.image_head, model.text_head):
                add_residual(head, adapter)
            return dataclasses.replace(model_init, adapter=adapter)
        if model_init.new_heads:
            with console.progress("fitting the heads"):
                if config.transfer.heads == "general":
                    heads = general_heads(model_init.config)
                else:
                    heads = fit_heads(model_init.config, train)
            if model is not None:
                model.load_state_dict(heads, strict=False)
            return dataclasses.replace(model_init, weights={**model_init.weights, **heads})
        if not model_init.weights:
            with console.progress("fitting the stem"):
                filters = fit_stem(model_init.config, train, parts.preprocess)
            return dataclasses.replace(model_init, stem_filters=filters)
        return model_init


def _check_device(config: Config, model_init: ModelInit) -> None:
    """Raise UserError for a model that MLX, or two devices together, cannot train."""
    if config.train.device == "mlx":
        from m1clip.mlx.step import check_supported

        check_supported(config, model_init)
    if config.train.device in HYBRIDS:
        hybrid.check_supported(config, model_init)


def _trial_config(config: Config, candidate: HeadCandidate, images: int) -> DecidedConfig:
    """The settings of a trial of heads on a part of the training images."""
    batch_size = min(config.train.batch_size_or(2), largest_batch(images))
    epochs = config.train.epochs or TRIAL_EPOCHS
    settings = config.with_values(
        lr=candidate.lr,
        adapter=candidate.adapter or "auto",
        heads=candidate.start or "auto",
        steps=max(1, round(epochs * (images // batch_size))),
        epochs=None,
        minutes=None,
        batch_size=batch_size,
        micro_batch=0,
        warmup=0.1,
        fsdp="off",
        teacher=None,
    )
    return DecidedConfig.of(settings)


@dataclass(frozen=True)
class Rank0Estimate:
    """The memory that rank 0 predicts: other ranks may use another amount for their libraries."""

    estimate: MemoryEstimate
    ranks: Ranks

    def peak(self, batch: int, checkpointing: bool) -> float:
        return self.ranks.on_rank0(lambda: self.estimate.peak(batch, checkpointing))

    def largest(self, limit: float, max_batch: int, checkpointing: bool) -> int:
        return self.ranks.on_rank0(lambda: self.estimate.largest(limit, max_batch, checkpointing))


def prepare(config: Config) -> RunInputs:
    """Decide a run of one process and open what it needs."""
    workbench = Workbench()
    spec = workbench.resolve(DecidedSettings(complete=config))
    return workbench.inputs(spec)
