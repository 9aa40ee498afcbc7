"""Everything that a run needs on this machine, for every recipe: opened data, initial model, device.

`Workbench` opens, loads and measures each thing once, when `resolve` or the run first needs it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch

from m1clip.config import Config
from m1clip.data.captions import tokenize_captions
from m1clip.data.decoding import DecodeOptions
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
from m1clip.data.types import Source, sample_ids_of
from m1clip.errors import UserError
from m1clip.evaluation.analysis import even_indices
from m1clip.formatting import ceil_div
from m1clip.hardware.device import (
    Device,
    Precision,
    autocast,
    check_compile,
    choose_device,
    choose_precision,
    threads,
)
from m1clip.hardware.facts import Facts, read_facts
from m1clip.hardware.memory import keep_freed_memory
from m1clip.inference.model import Model
from m1clip.inference.torch_encoder import TorchEncoder
from m1clip.losses.registry import DEFAULT_LOSS, LOSSES
from m1clip.model.clip import CLIP, count_parameters
from m1clip.model.folder import read_model
from m1clip.model.presets import CLIPConfig, HeadConfig, clip_config
from m1clip.model.pretrained.packages import installed
from m1clip.model.pretrained.registry import load_image_tower, load_text_tower, tower_image_size
from m1clip.model.weights import check_finite
from m1clip.text.base import Tokenizer
from m1clip.text.tokenizers import CharTokenizer, load_tokenizer, make_tokenizer
from m1clip.training.distributed import RankLost, Ranks
from m1clip.training.duration import Costs, TimeBudget
from m1clip.training.measure import Choice, calibrate, candidates, choose, memory_limit
from m1clip.training.memory import MemoryEstimate
from m1clip.training.resolve import (
    Dataset,
    InitialModel,
    Length,
    Machine,
    Measurements,
    MemoryFacts,
    describe_device,
    resolve,
    with_recipe,
)
from m1clip.training.spec import DecidedSettings, RunSpec, Settings, augmentation_of
from m1clip.training.step import TrainStep, step_class
from m1clip.training.transfer import (
    Start,
    Teacher,
    Trainable,
    fit_heads,
    fit_stem,
    load_features,
    load_teacher,
    open_feature_cache,
    parameter_counts,
)

HEAD_WIDTH, HEAD_DROPOUT = 512, 0.5  # of the hidden layer of a head
TOWER_CONTEXT, TOWER_EMBED = 64, 256  # defaults on pretrained towers
BYTES_PER_PARAMETER = 12  # weight, gradient and one moment of the optimizer in float32
MAX_UNSHARDED = 0.9  # of a GPU's memory; a step that needs more is sharded
TINY_SET = 100  # images; fewer cause a warning
SAMPLED_CAPTIONS = 20_000  # to find the longest caption
Result = TypeVar("Result")


@dataclass(frozen=True)
class Setup:
    """What a decided run works with on this machine."""

    config: Config  # decided, except for the number of steps while it is measured
    facts: Facts
    device: Device
    start: Start
    tokenizer: Tokenizer
    preprocess: Preprocess
    source: Source
    training: TrainingSet
    splits: dict[str, Split]
    choices: dict[str, Any]  # for the log: what was measured and found
    teacher: Teacher | None = None
    ranks: Ranks = field(default_factory=Ranks)

    @property
    def shape(self) -> CLIPConfig:
        return self.start.config

    @property
    def precision(self) -> Precision:
        return choose_precision(self.config.train.precision, self.device.kind, self.facts)

    @property
    def autocast(self) -> Callable[[], AbstractContextManager[object]]:
        return autocast(self.device, self.precision)

    @property
    def shards(self) -> bool:
        """Whether weights are divided among the ranks."""
        return self.config.train.fsdp == "on" and self.ranks.size > 1

    def build_model(self) -> CLIP:
        """The initialized model on the device, or on the CPU if only a part of it will be on the device."""
        return self._placed(seeded_build(self.start, self.config.seed))

    def _placed(self, model: CLIP) -> CLIP:
        model = model.to("cpu" if self.shards else self.device.torch)
        model.set_activation_checkpointing(self.config.model.grad_checkpointing)
        return model

    def make_step(self, model: CLIP | None = None) -> TrainStep:
        """The training step of `model`, which is the initial model, built now if it was not before."""
        model = self.build_model() if model is None else self._placed(model)
        settings = (self.config, self.device, self.precision, self.preprocess, self.teacher)
        self.ranks.share(list(model.state_dict().values()))  # other machines may round differently
        return step_class(self.device)(model, *settings, self.ranks)

    def complete_model(self, train_step: TrainStep) -> CLIP:
        """The model with all its weights: a copy if they are divided among the ranks, which must all call this."""
        if train_step.shards is None:
            return train_step.model
        model = self.start.build(load_weights=False)
        model.load_state_dict(
            train_step.shards.complete(train_step.model.state_dict(), on_all_ranks=True)
        )
        return model.to(self.device.torch).train()

    def divided(self, ranks: Ranks) -> Setup:
        """The setup of one rank, which trains on its rows of each batch."""
        if ranks.size > self.training.plan.batch:
            ranks.refuse(
                f"--batch-size {self.training.plan.batch} is less than one image for each of {ranks.size} ranks"
            )
        if ranks.size > 1 and self.device.kind in ("mps", "mlx"):
            kind = self.device.kind
            ranks.refuse(
                f"{kind}: torch.distributed cannot exchange its tensors; use one process, or --device cpu"
            )
        plan = dataclasses.replace(self.training.plan, part=(ranks.rank, ranks.size))
        training = dataclasses.replace(self.training, plan=plan)
        return dataclasses.replace(self, training=training, ranks=ranks)

    def describe_model(self) -> str:
        """One line about the model: its size, what is trained, and where its weights come from."""
        start = self.start
        trained, total = parameter_counts(start)
        if not start.weights:
            return f"{self.config.model.name}: {total:,} parameters, {self.tokenizer.vocab_size:,} tokens"
        if not start.new_heads:
            return f"from {self.config.transfer.init}: {trained:,} of {total:,} parameters trained"
        towers = f"{self.config.transfer.image_tower} (frozen) and {self.config.transfer.text_tower} (frozen)"
        return (
            f"{towers}, adapter heads to {self.shape.embed_dim}: {trained:,} of {total:,} trained"
        )

    def bundle(self, model: CLIP) -> Model:
        """The model with what it needs to encode images and texts, in the precision of the run."""
        return Model(TorchEncoder(model, self.tokenizer, self.preprocess, self.precision))


def seeded_build(start: Start, seed: int) -> CLIP:
    """The initial model on the CPU; its random weights are a function of the seed."""
    torch.manual_seed(seed)
    return start.build()


class Workbench:
    """Opens, loads and measures what a run is made of: each thing once, when it is first needed.

    With several ranks, rank 0 goes first, so that the others find what it has downloaded and cached; what it measures
    holds for all of them.
    """

    def __init__(
        self,
        decode: Callable[[Facts], DecodeOptions],
        say: Callable[[str], None],
        ranks: Ranks | None = None,
        budget: TimeBudget | None = None,
        saved: Path | None = None,
        source: Source | None = None,
    ) -> None:
        """`saved` is the folder of a run that is resumed; `source` is the data if it is open already."""
        self.facts = read_facts()
        self.decode = decode(self.facts)
        self.say = say
        self.ranks = ranks or Ranks()
        self.budget = budget
        self.costs = Costs()  # of an evaluation and of what follows the last step, if calibrated
        self.model: CLIP | None = None  # built already, because it has frozen towers
        self._saved = saved
        self._source = source
        self._is_checked = False
        self._model_parts: ModelParts | None = None
        self._text_tokens = 0  # of the longest caption
        self._splits: dict[str, Split] = {}
        self._setup: Setup | None = None
        self._record: dict[str, Any] = {}

    def resolve(self, settings: Settings) -> RunSpec:
        """Decide a run with what this machine measures."""
        try:
            settings = with_recipe(
                settings, lambda: self._dataset(settings.config), installed, self.say
            )
            self.ranks.everywhere(lambda: self._check_before_data(settings.config))
            dataset = self._dataset(settings.config)
            return resolve(settings, dataset, self.machine(), self.say)
        except RankLost:
            raise
        except UserError as error:
            if self.ranks.size > 1:
                self.ranks.refuse(str(error))  # all ranks decide the same, and rank 0 reports it
            raise

    def reopen(self, spec: RunSpec) -> Setup:
        """What a run works with whose spec was decided before: nothing is decided or measured."""
        self.ranks.everywhere(lambda: self._check_before_data(spec.config))
        self._load_start(spec.config)
        self.say(describe_device(spec.config, self.machine()))
        return self.setup(spec.config)

    def machine(self) -> Machine:
        """This machine, and the functions that measure."""
        measurements = Measurements(
            initial_model=self._initial_model,
            fastest=self._fastest,
            memory=self._memory,
            fits_one_gpu=self._fits_one_gpu,
            readable_images=self._readable_images,
            steps_in_time=self._steps_in_time,
        )
        facts = self.ranks.first(lambda: self.facts)
        return Machine(
            facts,
            measurements,
            self.ranks.size,
            is_installed=installed,
            has_gpu=lambda kind: Device(choose_device(kind, self.facts), self.facts).has_gpu,
            check_compile=check_compile,
        )

    def setup(self, config: Config, measured: dict[str, Any] | None = None) -> Setup:
        """What a run with this decided config works with."""
        if self._setup is None:
            self._load(config)
            self._setup = self._make_setup(config)
        choices = {**(measured or {}), **self._record}
        return dataclasses.replace(self._setup, config=config, choices=choices)

    def _rank0_first(self, work: Callable[[], Result]) -> Result:
        """Run on rank 0, then on the others, which find what it has cached; if one fails, all end."""
        results: list[Result] = []
        self.ranks.first(lambda: results.append(work()))
        return self.ranks.everywhere(lambda: results[0] if results else work())

    def _check_before_data(self, config: Config) -> None:
        """Report what is wrong without reading the data, which may take long."""
        choose_device(config.train.device, self.facts)
        if config.transfer.init is None and config.transfer.recipe == "scratch":
            _check_memory(clip_config(config.model), self.facts)

    def _dataset(self, config: Config) -> Dataset:
        source = self._open(config)
        return self.ranks.first(lambda: dataset_facts(source, config))

    def _open(self, config: Config) -> Source:
        """The data; a model to start from is read first, because that is faster."""
        if not self._is_checked:
            size = (
                self._parts(config).preprocess.image_size
                if config.transfer.init
                else _image_size(config)
            )
            if self._source is None:
                self._source = self._rank0_first(lambda: read_data(config, size, self.decode))
            source = self._source
            self.ranks.everywhere(lambda: check_training_data(source, config, self.decode.warn))
            self._is_checked = True
        assert self._source is not None
        return self._source

    def _parts(self, config: Config) -> ModelParts:
        """The initial model with its tokenizer and preprocessing."""
        if self._model_parts is None:
            if config.transfer.init is not None:
                self._model_parts = self._rank0_first(lambda: _from_model(config))
            elif config.transfer.recipe == "frozen":
                self._open(config)
                self._model_parts = self._rank0_first(lambda: _from_towers(config))
            else:
                source = self._open(config)
                tokenizer = self.ranks.first(lambda: _own_tokenizer(config, source, self._saved))
                self._model_parts = _from_random_weights(config, tokenizer)
        return self._model_parts

    @property
    def tokenizer(self) -> Tokenizer:
        assert self._model_parts is not None
        return self._model_parts.tokenizer

    @property
    def preprocess(self) -> Preprocess:
        assert self._model_parts is not None
        return self._model_parts.preprocess

    def _load_start(self, config: Config) -> Start:
        """The initial model, after a quick check of the data for it."""
        start = self._parts(config).start
        if self._text_tokens == 0:
            source = self._open(config)
            if config.train.device == "mlx":
                from m1clip.training.mlx_step import check_supported

                self.ranks.everywhere(lambda: check_supported(config, start))
            if not is_synthetic(config.data):
                self._record["lint"] = self.ranks.first(
                    lambda: quick_check(
                        source, start.config.context_length, self.say, self.decode.warn
                    )
                )
            captions = [
                caption for sample in source.sampled("train") for caption in sample.captions
            ]
            self._text_tokens = _longest(captions, self.tokenizer, start.config.context_length)
        return start

    def _initial_model(self, config: Config) -> InitialModel:
        start = self._load_start(config)
        return InitialModel(
            start.config,
            start.trainable,
            is_pretrained=bool(start.weights),
            new_heads=start.new_heads,
            char_tokens=isinstance(self.tokenizer, CharTokenizer),
        )

    def _fastest(self, config: Config) -> Choice:
        torch.set_num_threads(threads(config.train.threads, self.facts))
        start = self._load_start(config)

        def measure() -> Choice:
            if not candidates(config.train.device, config.train.precision, self.facts):
                choose_precision(
                    config.train.precision,
                    choose_device(config.train.device, self.facts),
                    self.facts,
                )
            return choose(config, start, self.facts, self._text_tokens)

        return self.ranks.first(measure)

    def _memory(self, config: Config) -> MemoryFacts:
        start = self._load_start(config)
        device = self._device(config)
        precision = choose_precision(config.train.precision, device.kind, self.facts)
        images = 0 if self._open(config).streamed else len(self._open(config).samples("train"))
        in_memory = device.kind == "cpu" and start.trainable.image
        data = images * start.config.image_size**2 * 3 if in_memory else 0
        estimate = MemoryEstimate(
            config, start, self.facts, device, precision, self._text_tokens, data
        )
        limit = self.ranks.first(lambda: memory_limit(config, device, self.facts))
        return MemoryFacts(
            limit, estimate if self.ranks.size == 1 else Rank0Estimate(estimate, self.ranks)
        )

    def _fits_one_gpu(self, config: Config, rows: int) -> bool:
        start = self._load_start(config)
        device = self._device(config)
        precision = choose_precision(config.train.precision, device.kind, self.facts)

        def fits() -> bool:
            tokens = start.config.context_length
            estimate = MemoryEstimate(config, start, self.facts, device, precision, tokens)
            peak = estimate.peak(rows, config.model.grad_checkpointing)
            return peak <= MAX_UNSHARDED * device.total_bytes()

        return self.ranks.first(fits)

    def _readable_images(self, config: Config) -> int:
        self._load(config)
        count = len(self._splits["train"].samples)
        self.ranks.check_same({"the number of training images": count})
        return count

    def _steps_in_time(self, config: Config) -> Length:
        assert config.train.minutes is not None
        budget = self.budget or TimeBudget(60 * config.train.minutes)
        found = calibrate(self.setup(config), budget, self.decode.warn)
        steps, evaluations, self.costs = self.ranks.first(
            lambda: (found.steps, found.evaluations, found.costs)
        )
        return Length(steps, evaluations)

    def _device(self, config: Config) -> Device:
        return Device(choose_device(config.train.device, self.facts), self.facts)

    def _load(self, config: Config) -> None:
        """Cache the images of all splits, or the features of frozen towers."""
        if not self._splits:
            torch.set_num_threads(threads(config.train.threads, self.facts))
            self._load_start(config)
            self._splits = self._rank0_first(lambda: self._load_splits(config))
            self._record["cache"] = {name: split.cache for name, split in self._splits.items()}

    def _load_splits(self, config: Config) -> dict[str, Split]:
        start = self._load_start(config)
        source = self._open(config)
        device = self._device(config)
        precision = choose_precision(config.train.precision, device.kind, self.facts)
        is_frozen = not all(start.trainable)
        if device.kind == "cpu" and is_frozen:
            keep_freed_memory()  # every batch of features needs the same blocks
        if is_frozen:
            self.model = seeded_build(start, config.seed)
        parts = (self.model, start, self.tokenizer, self.preprocess)
        cache = open_feature_cache(*parts, config, source, device, precision, self.decode)
        if is_frozen:
            self._record["features"] = str(cache.folder)
        # Else not measured.
        own_files = start.config.image_tower.kind == "vit" and not is_synthetic(config.data)
        samples = source.sampled("train") if own_files else ()
        margin = crop_margin(augmentation_of(config).crop_min, self.preprocess.image_size, samples)
        margins = {"train": margin, "val": 1.0, "test": 1.0}
        return {
            name: load_features(cache, config, source, name, start, margin)
            for name, margin in margins.items()
            if name in source.splits()
        }

    def _make_setup(self, config: Config) -> Setup:
        source = self._open(config)
        device = self._device(config)
        train = self._splits["train"]
        start = self._fitted(self._load_start(config), train)
        teacher = None
        if config.transfer.teacher is not None:
            precision = choose_precision(config.train.precision, device.kind, self.facts)
            teacher = self._rank0_first(
                lambda: load_teacher(config, source, train, device, precision, self.decode)
            )
            temperature = 1 / teacher.scale
            self.say(
                f"teacher    {config.transfer.teacher}: half of the loss, temperature {temperature:.3f}"
            )
        setup = Setup(
            config=config,
            facts=self.facts,
            device=device,
            start=start,
            tokenizer=self.tokenizer,
            preprocess=self.preprocess,
            source=source,
            training=_training_set(config, train, device, start.config.image_tower.patches),
            splits=self._splits,
            choices={},
            teacher=teacher,
        )
        if self.ranks.size > 1:
            self.ranks.check_same({"the hash of their captions": source.fingerprint(train.samples)})
        return setup.divided(self.ranks)

    def _fitted(self, start: Start, train: Split) -> Start:
        """The initial model with heads or a stem that are fitted to the training images."""
        if start.new_heads:
            with self.decode.progress("fitting the heads"):
                heads = fit_heads(start.config, train)
            if self.model is not None:
                self.model.load_state_dict(heads, strict=False)
            return dataclasses.replace(start, weights={**start.weights, **heads})
        if not start.weights:
            with self.decode.progress("fitting the stem"):
                filters = fit_stem(start.config, train, self.preprocess)
            return dataclasses.replace(start, stem_filters=filters)
        return start


@dataclass(frozen=True)
class Rank0Estimate:
    """The memory that rank 0 predicts: other ranks may use another amount for their libraries."""

    estimate: MemoryEstimate
    ranks: Ranks

    def peak(self, batch: int, checkpointing: bool) -> float:
        return self.ranks.first(lambda: self.estimate.peak(batch, checkpointing))

    def largest(self, limit: float, most: int, checkpointing: bool) -> int:
        return self.ranks.first(lambda: self.estimate.largest(limit, most, checkpointing))


def prepare(
    config: Config, say: Callable[[str], None], decode: Callable[[Facts], DecodeOptions]
) -> Setup:
    """Decide a run of one process and open what it needs."""
    workbench = Workbench(decode, say)
    spec = workbench.resolve(DecidedSettings(complete=config))
    return workbench.setup(spec.config, dict(spec.measured))


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


class ModelParts(NamedTuple):
    """An initial model with what it needs to read images and captions."""

    start: Start
    tokenizer: Tokenizer
    preprocess: Preprocess


def _own_tokenizer(config: Config, source: Source, saved: Path | None) -> Tokenizer:
    """The tokenizer of a model that starts from random weights; `saved` is the folder of a resumed run."""
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
    start = Start(clip_config(config.model, tokenizer, logit_bias=needs_bias))
    # A caption describes the edges of an image too. Models with CLIP's patch layer crop as CLIP does.
    resize: Literal["shortest", "squash"] = (
        "squash" if start.config.own_towers[0].stem == "conv" else "shortest"
    )
    return ModelParts(
        start, tokenizer, Preprocess(image_size=start.config.image_size, resize=resize)
    )


def _image_size(config: Config) -> int:
    """The image size of a model that does not start from a trained one."""
    if config.transfer.recipe == "frozen":
        return config.model.image_size or tower_image_size(config.transfer.image_tower)
    return clip_config(config.model).image_size


def read_data(config: Config, image_size: int, decode: DecodeOptions) -> Source:
    """Open the data of a run, with progress."""
    with decode.progress("reading the data") as show:
        return open_data(config.data, image_size, config.seed, show)


def check_training_data(source: Source, config: Config, warn: Callable[[str], None]) -> None:
    """Raise UserError if the images cannot fill a batch; warn if they are very few."""
    images = len(source.samples("train"))
    if images < 2:
        names = ", ".join(config.data.source)
        raise UserError(
            f"{names}: {images} training images found; contrastive training needs at least 2"
        )
    BatchPlan(images, config.train.batch_size_or(2), config.seed)
    if images < TINY_SET:
        warn(
            f"only {images} training images: the run will show that everything works, but the model will "
            f"overfit; expect scores near chance on other images, and use at least a few hundred images"
        )


def _training_set(config: Config, train: Split, device: Device, patches: int) -> TrainingSet:
    cached_features = train.image_features is not None
    resident = device.rules.resident and not cached_features
    blocks = train.samples.blocks() if isinstance(train.samples, ShardSamples) else None
    return TrainingSet(
        None if cached_features else train.images,
        train.lazy_captions or train.captions,
        BatchPlan(len(train.samples), config.train.batch_size_or(0), config.seed, blocks=blocks),
        augmentation_of(config),
        image_features=train.image_features,
        device_images=train.images.to_device(device.torch, device.free_bytes())
        if resident
        else None,
        full_length=device.rules.fixed_shapes or config.model.compile,
        identity=sample_ids_of(train.samples) if blocks is None else None,
        captions_per_image=config.data.captions_per_step or 1,
        patches=patches,
    )


def _from_model(config: Config) -> ModelParts:
    transfer = config.transfer
    saved = read_model(Path(transfer.init or ""))
    check_finite(saved.weights, saved.where)
    if saved.config.image_head.kind != "projection" and config.model.image_size not in (
        None,
        saved.config.image_size,
    ):
        raise UserError(
            f"{transfer.init}: the image size of a model with pretrained towers is fixed, {saved.config.image_size}"
        )
    saved = saved.resized(config.model.image_size)
    loss = config.train.loss
    if LOSSES[loss].needs_bias and not saved.config.logit_bias:
        raise UserError(
            f"{transfer.init}: has no logit bias for --loss {loss}; "
            f"use --loss {DEFAULT_LOSS}, or a model trained with {loss}"
        )
    preprocess = saved.preprocess
    if preprocess.resize != "squash":
        preprocess = dataclasses.replace(preprocess, resize=Preprocess(image_size=1).resize)
    start = Start(
        saved.config,
        saved.weights,
        Trainable(transfer.unfreeze_image != 0, transfer.unfreeze_text != 0),
        (transfer.unfreeze_image, transfer.unfreeze_text),
    )
    return ModelParts(start, saved.tokenizer, preprocess)


def _from_towers(config: Config) -> ModelParts:
    transfer, context = config.transfer, config.model.context_length or TOWER_CONTEXT
    image_tower, image, preprocess = load_image_tower(
        transfer.image_tower, _image_size(config), transfer.download
    )
    text_tower, text, tokenizer = load_text_tower(transfer.text_tower, context, transfer.download)
    weights = {f"image_tower.{name}": value for name, value in image.items()}
    weights |= {f"text_tower.{name}": value for name, value in text.items()}
    head = HeadConfig(kind="adapter", hidden=HEAD_WIDTH, dropout=HEAD_DROPOUT)
    shape = CLIPConfig(
        image_tower=image_tower,
        text_tower=text_tower,
        image_head=head,
        text_head=head,
        embed_dim=config.model.embed_dim or TOWER_EMBED,
        logit_bias=LOSSES[config.train.loss].needs_bias,
    )
    return ModelParts(
        Start(shape, weights, Trainable(False, False), new_heads=True), tokenizer, preprocess
    )


def _check_memory(shape: CLIPConfig, facts: Facts) -> None:
    """Raise UserError, before reading the data, for a model that does not fit this machine at any batch size."""
    count = count_parameters(shape)
    memory = max(facts.memory_bytes, torch.cuda.mem_get_info()[1] if facts.cuda else 0)
    if count * BYTES_PER_PARAMETER > memory:
        raise UserError(
            f"a model of {count / 1e9:,.1f} billion parameters needs {count * BYTES_PER_PARAMETER / 1e9:,.0f} GB to "
            f"train, this machine has {memory / 1e9:,.0f} GB: choose a smaller --model"
        )


def _longest(captions: list[str], tokenizer: Tokenizer, context_length: int) -> int:
    """Tokens of the longest caption, rounded up to a multiple of 8."""
    sample = [captions[place] for place in even_indices(len(captions), SAMPLED_CAPTIONS)]
    longest = int(tokenize_captions([tuple(sample)], tokenizer, context_length).lengths.max())
    return min(ceil_div(longest, 8) * 8, context_length)
