"""Everything that a run needs on this machine, for every recipe: opened data, initial model,
device.

`Workbench` opens, loads and measures each thing once, when `resolve` or the run first needs it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from m1clip import console, time_use
from m1clip.config import Config
from m1clip.data.captions import tokenize_captions
from m1clip.data.decoding import DecodeOptions, decode_options
from m1clip.data.images import Preprocess
from m1clip.data.loader import BatchPlan, TrainingSet
from m1clip.data.prepare import (
    Split,
    crop_margin,
    is_synthetic,
    often_mention_sides,
    open_data,
    quick_check,
)
from m1clip.data.sources.stream import ShardSamples
from m1clip.data.split_record import Record, keep_splits, read_splits, recorded_splits
from m1clip.data.types import Source, sample_ids_of
from m1clip.errors import UserError
from m1clip.evaluation.split_analyses import even_indices
from m1clip.formatting import ceil_div, plural
from m1clip.hardware.device import (
    HYBRIDS,
    Device,
    check_compile,
    choose_device,
    choose_precision,
    threads,
)
from m1clip.hardware.machine_info import MachineInfo, read_machine_info
from m1clip.hardware.memory import keep_freed_memory
from m1clip.losses.registry import DEFAULT_LOSS, LOSSES
from m1clip.model import named
from m1clip.model.clip import CLIP, count_parameters
from m1clip.model.folder import SavedModel, check_exists, read_model
from m1clip.model.presets import CLIPConfig, HeadConfig, clip_config
from m1clip.model.pretrained.packages import PACKAGES, installed, tower_parts
from m1clip.model.pretrained.registry import load_image_tower, load_text_tower, tower_image_size
from m1clip.model.residual import add_residual, residual_kinds
from m1clip.model.weights import check_finite
from m1clip.text.base import Tokenizer
from m1clip.text.tokenizers import CharTokenizer, load_tokenizer, make_tokenizer
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
    GENERAL_BELOW_IMAGES,
    MOST_IMAGES,
    HeadCandidate,
    HeadStart,
    HeadTrial,
    Scores,
    choose_heads,
    copy_with_own_heads,
    fits_general,
    general_heads,
    head_candidates,
    run_trial,
    split_rows,
)
from m1clip.training.inputs import ModelParts, RunInputs, seeded_build
from m1clip.training.memory import MemoryEstimate, estimate_memory, fits_one_gpu, memory_limit
from m1clip.training.recipe_choice import with_recipe
from m1clip.training.resolve import describe_device, resolve
from m1clip.training.spec import (
    DecidedConfig,
    DecidedData,
    DecidedSettings,
    RunSpec,
    Settings,
    augmentation_of,
)
from m1clip.training.tower_choice import AUTO, base_of
from m1clip.training.transfer import (
    ModelInit,
    Trainable,
    fit_heads,
    fit_stem,
    load_features,
    load_teacher,
    open_feature_cache,
)
from m1clip.training.tuning import flops_per_second, model_size

HEAD_HIDDEN_WIDTH, HEAD_DROPOUT = 512, 0.5  # of the hidden layer of a head
TOWER_CONTEXT, TOWER_EMBED = 64, 256  # defaults on pretrained towers
BYTES_PER_PARAMETER = 12  # weight, gradient and one moment of the optimizer in float32
TINY_SET = 100  # images; fewer cause a warning
SAMPLED_CAPTIONS = 20_000  # to find the longest caption
TRIAL_EPOCHS = 8  # of a trial of the heads, unless the user gives --epochs
UNMEASURED_STEPS = 1000  # of a run while the number that fits in its time is measured
Result = TypeVar("Result")


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
        self._is_checked = False
        self._model_parts: ModelParts | None = None
        self._members = 1  # in the settings that the model was made from
        self._initial_saved: SavedModel | None = None
        self._text_tokens = 0  # of the longest caption
        self._splits: dict[str, Split] = {}
        self._inputs: RunInputs | None = None
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
        self._load_model_init(spec.config)
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
        self._parts(spec.config)
        if self._inputs is None:
            self._load(spec.config)
            self._inputs = self._make_inputs(spec)
        measured = {**spec.measured, **self._record}
        return dataclasses.replace(self._inputs, spec=dataclasses.replace(spec, measured=measured))

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

    def _rank0_first(self, work: Callable[[], Result]) -> Result:
        """Run on rank 0, then on the others, which find what it has cached.

        If one fails, all end.
        """
        results: list[Result] = []
        self.ranks.on_rank0(lambda: results.append(work()))
        return self.ranks.on_all_ranks(lambda: results[0] if results else work())

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
            _check_memory(clip_config(config.model), self.facts)

    def _dataset(self, config: Config) -> Dataset:
        source = self._open(config)
        return self.ranks.on_rank0(lambda: dataset_facts(source, config))

    @time_use.count_as("data")
    def _open(self, config: Config) -> Source:
        """The data; a model to start from is read first, because that is faster."""
        if not self._is_checked:
            size = (
                config.model.image_size or self._initial(config).preprocess.image_size
                if config.transfer.init
                else _image_size(config)
            )
            if self._source is None:
                self._source = self._rank0_first(lambda: read_data(config, size))
            source = self._source
            record = self.ranks.on_rank0(lambda: self._recorded_splits(config))
            if (moved := keep_splits(source, record).total()) and self._saved is None:
                images = plural(moved, "image")
                console.print(
                    f"splits     {images} stay in the split that {config.transfer.init} had them in"
                )
            self.ranks.on_all_ranks(lambda: check_training_data(source, config))
            self._is_checked = True
        assert self._source is not None
        return self._source

    def _recorded_splits(self, config: Config) -> Record:
        """The splits of the run that is resumed, or of that whose model this run starts from."""
        if self._saved is not None:
            return read_splits(self._saved)
        init = config.transfer.init
        return {} if init is None else recorded_splits(init, config.data.source)

    def _parts(self, config: Config) -> ModelParts:
        """The initial model with its tokenizer and preprocessing."""
        members = config.model.members or 1
        if self._members != members:  # decided after the first measurement
            self._model_parts = None
            self._inputs = None
            self._members = members
        if self._model_parts is None:
            if config.transfer.init is not None:
                saved = self._initial(config)
                self._model_parts = self.ranks.on_all_ranks(lambda: _from_model(config, saved))
            elif config.transfer.recipe == "frozen":
                self._open(config)
                self._model_parts = self._rank0_first(lambda: _from_towers(config))
            else:
                source = self._open(config)
                tokenizer = self.ranks.on_rank0(lambda: _own_tokenizer(config, source, self._saved))
                self._model_parts = _from_random_weights(config, tokenizer)
        init, mirror = self._model_parts.init, config.model.mirror
        if mirror not in (None, init.config.mirror):  # decided after the data was read
            init = dataclasses.replace(init, config=dataclasses.replace(init.config, mirror=mirror))
            self._model_parts = self._model_parts._replace(init=init)
            self._inputs = None
        return self._model_parts

    def _initial(self, config: Config) -> SavedModel:
        """The model of --init as it is saved."""
        if self._initial_saved is None:
            self._initial_saved = self._rank0_first(lambda: _read_init(config))
        return self._initial_saved

    def _tuning(self, config: Config) -> TuningFacts:
        """The model of --init and this machine, as far as they decide what of the model
        is trained.
        """
        device = self._device(config)
        shape = self._initial(config).config
        size = model_size(shape, count_parameters(shape))

        def measure() -> TuningFacts:
            limit = memory_limit(config, device, self.facts)
            cores = config.train.threads or self.facts.performance_cores
            return TuningFacts(limit, flops_per_second(device.kind, cores), size)

        return self.ranks.on_rank0(measure)

    @property
    def tokenizer(self) -> Tokenizer:
        assert self._model_parts is not None
        return self._model_parts.tokenizer

    @property
    def preprocess(self) -> Preprocess:
        assert self._model_parts is not None
        return self._model_parts.preprocess

    def _load_model_init(self, config: Config) -> ModelInit:
        """The initial model, after a quick check of the data for it."""
        model_init = self._parts(config).init
        if self._text_tokens == 0:
            source = self._open(config)
            if config.train.device == "mlx":
                from m1clip.mlx.step import check_supported

                self.ranks.on_all_ranks(lambda: check_supported(config, model_init))
            if config.train.device in HYBRIDS:
                self.ranks.on_all_ranks(lambda: hybrid.check_supported(config, model_init))
            if not is_synthetic(config.data):
                with time_use.part("checks"):
                    self._record["lint"] = self.ranks.on_rank0(
                        lambda: quick_check(source, model_init.config.context_length)
                    )
            captions = [
                caption for sample in source.sampled("train") for caption in sample.captions
            ]
            self._text_tokens = _longest(captions, self.tokenizer, model_init.config.context_length)
        return model_init

    def _initial_model(self, config: Config) -> InitialModel:
        model_init = self._load_model_init(config)
        return InitialModel(
            model_init.config,
            model_init.trainable,
            is_pretrained=bool(model_init.weights),
            new_heads=model_init.new_heads,
            char_tokens=isinstance(self.tokenizer, CharTokenizer),
        )

    @time_use.count_as("checks")
    def _fastest(self, config: Config) -> Choice:
        torch.set_num_threads(threads(config.train.threads, self.facts))
        model_init = self._load_model_init(config)
        tokens = self._text_tokens
        return self.ranks.on_rank0(lambda: fastest(config, model_init, self.facts, tokens))

    @time_use.count_as("checks")
    def _memory(self, config: Config) -> MemoryFacts:
        model_init = self._load_model_init(config)
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
        model_init = self._load_model_init(config)
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
        budget = self.budget or TimeBudget(60 * config.train.minutes)
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
        model_init = self._load_model_init(config)
        adapters = () if model_init.new_heads else residual_kinds(self.frozen_model.image_head)
        if adapters and config.transfer.adapter != "auto":
            adapters = (config.transfer.adapter,)
        starts: tuple[HeadStart, ...] = ()
        if model_init.new_heads:
            starts = head_starts(config, model_init.config, len(train.samples))
        rows, held_out = split_rows(len(train.samples), config.seed)

        def trial(candidate: HeadCandidate) -> Scores:
            splits = {
                "train": train.subset_of_features(rows),
                "val": train.subset_of_features(held_out),
            }
            batch = min(config.train.batch_size_or(2), largest_batch(len(rows)))
            steps = max(1, round((config.train.epochs or TRIAL_EPOCHS) * (len(rows) // batch)))
            values = {
                "lr": candidate.lr,
                "adapter": candidate.adapter or "auto",
                "heads": candidate.start or "auto",
            }
            settings = config.with_values(
                **values, steps=steps, epochs=None, minutes=None, batch_size=batch, warmup=0.1,
                fsdp="off", teacher=None, micro_batch=0,
            )  # fmt: skip
            spec = RunSpec(DecidedConfig.of(settings))
            model = copy_with_own_heads(self.frozen_model)
            inputs = self._make_inputs(spec, splits, model)
            return run_trial(inputs, model)

        def choose() -> HeadTrial:
            candidates = head_candidates(adapters, starts, lr)
            if model_init.new_heads and len(train.samples) >= MOST_IMAGES:
                usual = f"as measured on {plural(MOST_IMAGES, 'image')} or more"
                return HeadTrial(candidates[0], usual)
            with console.progress("trying ways to train the heads"):
                return choose_heads(candidates, len(train.samples), trial)

        return self.ranks.on_rank0(choose)

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
            self._load_model_init(config)
            self._splits = self._rank0_first(lambda: self._load_splits(config))
            self._record["cache"] = {name: split.cache for name, split in self._splits.items()}

    @time_use.count_as("decoding")
    def _load_splits(self, config: Config) -> dict[str, Split]:
        model_init = self._load_model_init(config)
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
        parts = ModelParts(model_init, self.tokenizer, self.preprocess)
        cache = open_feature_cache(
            self.model, parts, config, source, device, precision, self._decoding(device)
        )
        if is_frozen:
            self._record["features"] = str(cache.folder)
        # Else not measured.
        own_files = model_init.config.image_tower.kind == "vit" and not is_synthetic(config.data)
        samples = source.sampled("train") if own_files else ()
        crop_min = DecidedData.of(config.data).crop_min
        margin = crop_margin(crop_min, self.preprocess.image_size, samples)
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
        model_init = self._fit_init(self._load_model_init(config), train, config, model)
        teacher = None
        if config.transfer.teacher is not None:
            precision = choose_precision(config.train.precision, device.name, self.facts)
            teacher = self._rank0_first(
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
            model=ModelParts(model_init, self.tokenizer, self.preprocess),
            source=source,
            training=_training_set(config, train, device, model_init.config.image_tower.patches),
            splits=splits,
            teacher=teacher,
        )
        if is_trial:
            return inputs
        if self.ranks.size > 1:
            self.ranks.check_same({"the hash of their captions": source.fingerprint(train.samples)})
        return inputs.for_rank(self.ranks)

    def _fit_init(
        self, model_init: ModelInit, train: Split, config: DecidedConfig, model: CLIP | None
    ) -> ModelInit:
        """The initial model with heads or a stem that are fitted to the training images, or with
        adapters.

        `model` is the initial model, if it is built already.
        """
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
                filters = fit_stem(model_init.config, train, self.preprocess)
            return dataclasses.replace(model_init, stem_filters=filters)
        return model_init


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


def head_starts(config: Config, shape: CLIPConfig, images: int) -> tuple[HeadStart, ...]:
    """Where new heads may start: from CCA, and with few images on the same towers from the model
    general.
    """
    requested = config.transfer.heads
    if requested == "general" and not fits_general(shape):
        raise UserError(
            "--heads general needs its towers and embeddings: remove --image-tower, --text-tower"
            " and --embed-dim"
        )
    if requested != "auto":
        return (requested,)
    may_be_general = images < GENERAL_BELOW_IMAGES and fits_general(shape)
    return ("cca", "general") if may_be_general else ("cca",)


def dataset_facts(source: Source, config: Config) -> Dataset:
    """What a run's decisions need to know of its data."""
    samples = source.sampled("train")
    captions = [caption for sample in samples for caption in sample.captions]
    return Dataset(
        images=len(source.samples("train")),
        streamed=source.streamed,
        median_captions=int(np.median([len(sample.captions) for sample in samples])),
        fewest_captions=source.fewest_captions("train"),
        mentions_sides=not is_synthetic(config.data) and often_mention_sides(captions),
    )


def _own_tokenizer(config: Config, source: Source, saved: Path | None) -> Tokenizer:
    """The tokenizer of a model that starts from random weights.

    `saved` is the folder of a resumed run.
    """
    if saved is not None:
        return load_tokenizer(saved)
    captions = [caption for sample in source.sampled("train") for caption in sample.captions]
    kind = (
        "bpe"
        if source.streamed and config.model.tokenizer == "clip-bpe-pruned"
        else config.model.tokenizer
    )
    return make_tokenizer(kind, captions)


def _from_random_weights(config: Config, tokenizer: Tokenizer) -> ModelParts:
    needs_bias = LOSSES[config.train.loss].needs_bias
    model_init = ModelInit(clip_config(config.model, tokenizer, logit_bias=needs_bias))
    # A caption describes the edges of an image too. Models with CLIP's patch layer crop as CLIP
    # does.
    resize: Literal["shortest", "squash"] = (
        "squash" if model_init.config.own_towers[0].stem == "conv" else "shortest"
    )
    return ModelParts(
        model_init, tokenizer, Preprocess(image_size=model_init.config.image_size, resize=resize)
    )


def _image_size(config: Config) -> int:
    """The image size of a model that does not start from a trained one."""
    if config.transfer.recipe == "frozen":
        return config.model.image_size or tower_image_size(base_of(config.transfer.image_tower))
    return clip_config(config.model).image_size


def read_data(config: Config, image_size: int) -> Source:
    """Open the data of a run, with progress."""
    with console.progress("reading the data"):
        return open_data(config.data, image_size, config.seed)


def check_training_data(source: Source, config: Config) -> None:
    """Raise UserError if the images cannot fill a batch; warn if they are very few."""
    images = len(source.samples("train"))
    if images < 2:
        names = ", ".join(config.data.source)
        raise UserError(
            f"{names}: {images} training images found; contrastive training needs at least 2"
        )
    BatchPlan(images, config.train.batch_size_or(2), config.seed)
    if images < TINY_SET and (config.transfer.init or config.transfer.recipe != "scratch"):
        console.warn(
            f"only {images} training images: expect a small gain over the pretrained model or none,"
            " and wide intervals"
        )
    elif images < TINY_SET:
        console.warn(
            f"only {images} training images: the run will show that everything works, but the model"
            " will overfit; expect scores near chance on other images, and use at least a few"
            " hundred images"
        )


def _training_set(config: DecidedConfig, train: Split, device: Device, patches: int) -> TrainingSet:
    cached_features = train.image_features is not None
    resident = device.capabilities.on_device and not cached_features
    blocks = train.samples.blocks() if isinstance(train.samples, ShardSamples) else None
    return TrainingSet(
        None if cached_features else train.images,
        train.lazy_captions or train.captions,
        BatchPlan(len(train.samples), config.train.batch_size, config.seed, blocks=blocks),
        augmentation_of(config.data),
        image_features=train.image_features,
        device_images=train.images.to_device(device.torch, device.free_bytes())
        if resident
        else None,
        full_length=device.capabilities.fixed_shapes or config.model.compile,
        identity=sample_ids_of(train.samples) if blocks is None else None,
        captions_per_image=config.data.captions_per_step,
        patches=patches,
        mild_after=config.data.mild_after,
    )


def _read_init(config: Config) -> SavedModel:
    saved = read_model(Path(config.transfer.init or ""))
    check_finite(saved.weights, saved.where)
    return saved


def _from_model(config: Config, saved: SavedModel) -> ModelParts:
    transfer = config.transfer
    if saved.config.image_head.kind == "adapter" and config.model.image_size not in (
        None,
        saved.config.image_size,
    ):
        raise UserError(
            f"{transfer.init}: the image size of a model with pretrained towers is fixed,"
            f" {saved.config.image_size}"
        )
    saved = saved.resized(config.model.image_size)
    loss = config.train.loss
    if LOSSES[loss].needs_bias and not saved.config.logit_bias:
        raise UserError(
            f"{transfer.init}: has no logit bias for --loss {loss}; "
            f"use --loss {DEFAULT_LOSS}, or a model trained with {loss}"
        )
    preprocess = saved.preprocess
    if "-floor" in preprocess.resize:
        resize: Any = preprocess.resize.replace("-floor", "")
        preprocess = dataclasses.replace(preprocess, resize=resize)
    if transfer.recipe == "frozen":
        saved = saved.with_projections()
    model_init = ModelInit(
        saved.config,
        saved.weights,
        Trainable(
            transfer.recipe != "frozen" and transfer.unfreeze_image != 0,
            transfer.recipe != "frozen" and transfer.unfreeze_text != 0,
        ),
        (transfer.unfreeze_image, transfer.unfreeze_text),
        transfer.lora,
        None if transfer.adapter == "auto" else transfer.adapter,
    )
    return ModelParts(model_init, saved.tokenizer, preprocess)


def _from_towers(config: Config) -> ModelParts:
    transfer, context = config.transfer, config.model.context_length or TOWER_CONTEXT
    image_tower, image, preprocess = load_image_tower(transfer.image_tower, _image_size(config))
    text_tower, text, tokenizer = load_text_tower(transfer.text_tower, context)
    weights = {f"image_tower.{name}": value for name, value in image.items()}
    weights |= {f"text_tower.{name}": value for name, value in text.items()}
    head = HeadConfig(kind="adapter", hidden=HEAD_HIDDEN_WIDTH, dropout=HEAD_DROPOUT)
    shape = CLIPConfig(
        image_tower=image_tower,
        text_tower=text_tower,
        image_head=head,
        text_head=head,
        embed_dim=config.model.embed_dim or TOWER_EMBED,
        logit_bias=LOSSES[config.train.loss].needs_bias,
    )
    return ModelParts(
        ModelInit(shape, weights, Trainable(False, False), new_heads=True), tokenizer, preprocess
    )


def _check_memory(shape: CLIPConfig, facts: MachineInfo) -> None:
    """Raise UserError, before reading the data, for a model that does not fit this machine at any
    batch size.
    """
    count = count_parameters(shape)
    memory = max(facts.memory_bytes, torch.cuda.mem_get_info()[1] if facts.cuda else 0)
    if count * BYTES_PER_PARAMETER > memory:
        raise UserError(
            f"a model of {count / 1e9:,.1f} billion parameters needs"
            f" {count * BYTES_PER_PARAMETER / 1e9:,.0f} GB to train, this machine has"
            f" {memory / 1e9:,.0f} GB: choose a smaller --model"
        )


def _longest(captions: list[str], tokenizer: Tokenizer, context_length: int) -> int:
    """Tokens of the longest caption, rounded up to a multiple of 8."""
    sample = [captions[index] for index in even_indices(len(captions), SAMPLED_CAPTIONS)]
    longest = int(tokenize_captions([tuple(sample)], tokenizer, context_length).lengths.max())
    return min(ceil_div(longest, 8) * 8, context_length)
