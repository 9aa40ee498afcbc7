"""Choose how heads on cached features are trained, by trials on a held-out part of the training
images.

The images of the validation and test splits take no part. A trial is a short run of the real
training step.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
from safetensors.torch import load as tensors_from_bytes
from torch import nn

from m1clip import console
from m1clip.config import Config
from m1clip.data import randomness as rnd
from m1clip.data.loader import batches
from m1clip.errors import UserError
from m1clip.evaluation.retrieval import ranks
from m1clip.formatting import number, plural
from m1clip.inference.features import SplitFeatures
from m1clip.model.clip import CLIP
from m1clip.model.named import BOXED, CONFIG, GENERAL, HEADS, boxed_files
from m1clip.model.presets import CLIPConfig
from m1clip.model.residual import ResidualKind
from m1clip.model.weights import Tensors
from m1clip.training.duration import TimeBudget
from m1clip.training.schedule import scheduled_lr_fraction
from m1clip.training.validation import encode

if TYPE_CHECKING:
    from m1clip.training.inputs import RunInputs

# Of the training split, at most: nearly all of those that a trial is made for. With 1,000 images,
# training makes the closed form worse, with 3,000 better, so a trial on a part of them would be
# wrong (docs/how-many-images.md).
TRIAL_IMAGES = 4_000
TRIAL_PARTS = 5  # one of them is held out
MAX_HELD_OUT = 500
LEAST_IMAGES = 40  # with fewer, the held-out images would decide by chance
MOST_IMAGES = (
    4_000  # with more, new heads have the settings of the recipe, which was tuned on 6,000
)
GENERAL_BELOW_IMAGES = 2_000  # with fewer, new heads may start from those of the model general
NEW_HEAD_LRS = (3e-4, 1e-4)
# An adapter on embeddings starts from zero, one on features from weights that are small.
ADAPTER_LRS: dict[ResidualKind, tuple[float, ...]] = {
    "embeddings": (1e-3, 3e-4),
    "features": (3e-4, 1e-4),
}
TRIAL_FRACTION = 0.3  # of the time that is left of --minutes, at most, for all trials
CAREFUL = 0.1  # of the lowest learning rate, if no trial gains or there are too few images
# A start whose geometric mean rank is higher by this factor, and by so many standard errors, is not
# trained: with up to 1,000 images, eight epochs raised recall@10 by 2% at most, and mostly lowered it
# (docs/results/few_images_before.json).
MAX_LOST = math.log(1.5)
CLEARLY = 3.0
SPLIT_STREAM = 1 << 17  # a random stream separate from the data's
SAME_AS_GENERAL = ("image_tower", "text_tower", "embed_dim")  # of a model whose heads fit
WIDER_PARTS = ("up.weight", "up.bias")  # parts of a head with one row per hidden unit
NARROW_PART = "down.weight"  # the part with one column per hidden unit


HeadStart = Literal["cca", "general"]
InitialHeads = tuple[ResidualKind | None, HeadStart | None]
# The scores of each held-out image before training, then after it.
Scores = Iterator[np.ndarray]
IsLate = Callable[[], bool]  # whether the time for trials is over
STARTS = {"cca": "CCA of these images", "general": "the model general"}


class HeadCandidate(NamedTuple):
    """One way to train heads."""

    lr: float
    adapter: ResidualKind | None = None  # of a trained model; None: new heads
    start: HeadStart | None = None  # of new heads

    @property
    def initial(self) -> InitialHeads:
        """What the heads are before training, whatever the learning rate."""
        return self.adapter, self.start

    def __str__(self) -> str:
        on = "" if self.adapter is None else f"adapters on {self.adapter}, "
        start = "" if self.start is None else f"from {STARTS[self.start]}, "
        return f"{start}{on}lr {number(self.lr)}"


class HeadTrial(NamedTuple):
    """The candidate to use and why, and the mean rank of each on held-out images, of the initial
    heads first. A candidate that is not trained has the rank of its own initial heads.
    """

    chosen: HeadCandidate
    reason: str
    start: float | None = None
    ranks: tuple[float, ...] = ()
    held_out: int = 0


def head_candidates(
    adapters: Sequence[ResidualKind], starts: Sequence[HeadStart] = (), lr: float | None = None
) -> list[HeadCandidate]:
    """What to try: the `adapters` of a trained model, or the `starts` of new heads.

    `lr` is that of the user.
    """
    adapted = [
        HeadCandidate(rate, adapter)
        for adapter in adapters
        for rate in ([lr] if lr is not None else ADAPTER_LRS[adapter])
    ]
    new = [
        HeadCandidate(rate, None, start)
        for start in starts
        for rate in ([lr] if lr is not None else NEW_HEAD_LRS)
    ]
    return adapted + new


def split_rows(images: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(rows to train on, held-out rows) of the training split, both in order."""
    draws = rnd.bits(seed, 0, np.arange(images), SPLIT_STREAM)
    chosen = np.argsort(draws, kind="stable")[:TRIAL_IMAGES]
    held_out = held_out_images(images)
    return np.sort(chosen[held_out:]), np.sort(chosen[:held_out])


def held_out_images(images: int) -> int:
    """How many images of a training split of this size a trial holds out."""
    return min(min(images, TRIAL_IMAGES) // TRIAL_PARTS, MAX_HELD_OUT)


def log_ranks(features: SplitFeatures) -> np.ndarray:
    """(images,) the logarithm of the rank of what is right, the mean of both directions and of the
    captions of an image: smoother than recall on few images.
    """
    retrieval_ranks = ranks(*features[:4])
    count = np.bincount(features.image_index, minlength=len(features.image))
    by_text = np.bincount(
        features.image_index, np.log(retrieval_ranks.text_to_image), minlength=len(features.image)
    )
    by_image: np.ndarray = np.log(retrieval_ranks.image_to_text)
    return (by_text / np.maximum(count, 1) + by_image) / 2


def never() -> bool:
    """The end of the time for trials, where there is none."""
    return False


def trial_limit(budget: TimeBudget) -> IsLate:
    """The end of the trials' part of --minutes, counted from now."""
    end = budget.used + TRIAL_FRACTION * budget.remaining
    return lambda: budget.used > end


def run_trial(inputs: RunInputs, model: CLIP, is_late: IsLate = never) -> Scores:
    """The scores of the held-out images before training on the trial's images, then after it.

    Lower is better. Without the second scores if the time is over before the last step.
    """
    train_step = inputs.make_step(model)
    yield log_ranks(encode(inputs, train_step.model, "val"))
    steps = inputs.config.train.steps
    for step, batch in enumerate(batches(inputs.training, 0, steps, 0, "fork", pin=False)):
        train_step.parts.update.optimizer.set_lr(
            scheduled_lr_fraction(inputs.config.optim, inputs.spec.plan, step)
        )
        if is_late():
            return
        train_step.run(batch, step)
    yield log_ranks(encode(inputs, train_step.model, "val"))


def choose_heads(
    candidates: Sequence[HeadCandidate],
    images: int,
    trial: Callable[[HeadCandidate], Scores],
    is_late: IsLate = never,
) -> HeadTrial:
    """The candidate with the lowest rank on held-out images.

    A careful one where none gains over the best start. Training new heads that start from the
    closed form must gain more than the standard error: on few images it is expected to lose.
    Candidates whose trial does not end in time are not chosen.
    """
    lowest = CAREFUL * min(candidate.lr for candidate in candidates)
    if images < LEAST_IMAGES:
        few = f"{images} images are too few to compare on held-out ones"
        return HeadTrial(candidates[-1]._replace(lr=lowest), few)
    if len(candidates) == 1:
        return HeadTrial(candidates[0], "there is nothing to choose")
    scores, untried = _scores(candidates, trial, is_late)
    before = [float(score.mean()) for score, _ in scores]
    after = [float(score.mean()) for _, score in scores]
    best, best_start = int(np.argmin(after)), int(np.argmin(before))
    held_out = held_out_images(images)
    shown = [math.exp(value) for value in (before[best_start], after[best])]
    gains = scores[best_start][0] - scores[best][1]  # of each held-out image
    needed = 0.0
    if candidates[best].adapter is None:
        needed = standard_error(gains)
    where = f"on {held_out} held-out training images (geometric mean)"
    if untried:
        where += f"; no time for {untried} of {plural(len(candidates), 'trial')}"
    facts = (before[best_start], tuple(after), held_out)
    if gains.mean() <= needed:
        clearly = "clearly " if gains.mean() > 0 else ""
        why = f"no trial {clearly}improves the rank {shown[0]:.2f} of the initial heads {where}"
        return HeadTrial(candidates[best_start]._replace(lr=lowest), why, *facts)
    reason = f"the rank of what is right falls from {shown[0]:.2f} to {shown[1]:.2f} {where}"
    return HeadTrial(candidates[best], reason, *facts)


def _scores(
    candidates: Sequence[HeadCandidate], trial: Callable[[HeadCandidate], Scores], is_late: IsLate
) -> tuple[list[tuple[np.ndarray, np.ndarray]], int]:
    """The scores before and after each candidate's trial, and how many trials the time did not
    suffice for.

    A start that is clearly worse than another is not trained: both scores are those before. So are
    those of a trial that did not end in time.
    """
    started: dict[HeadCandidate, Scores] = {}
    before: dict[InitialHeads, np.ndarray] = {}
    for candidate in candidates:
        if candidate.initial not in before:
            started[candidate] = trial(candidate)
            before[candidate.initial] = next(started[candidate])
    lowest = min(before.values(), key=np.mean)
    scores = []
    untried = 0
    for done, candidate in enumerate(candidates):
        console.current_progress()(done, len(candidates))
        initial = before[candidate.initial]
        if is_clearly_worse(initial, lowest):
            scores.append((initial, initial))
            continue
        trained = None
        if not is_late():
            run = started.pop(candidate, None)
            if run is None:
                run = trial(candidate)
                next(run)
            trained = next(run, None)
        if trained is None:
            untried += 1
            trained = initial
        scores.append((initial, trained))
    return scores, untried


def is_clearly_worse(scores: np.ndarray, others: np.ndarray) -> bool:
    """Whether the ranks of some heads are higher by a factor that training does not make up for."""
    loss = scores - others  # of each held-out image
    return bool(loss.mean() > max(MAX_LOST, CLEARLY * standard_error(loss)))


def standard_error(values: np.ndarray) -> float:
    """Of the mean; 0 for one value."""
    return float(values.std(ddof=1)) / len(values) ** 0.5 if len(values) > 1 else 0.0


def copy_with_own_heads(model: CLIP) -> CLIP:
    """A model with copies of the heads and the temperature; the towers are shared."""
    clone = copy.copy(model)
    clone._modules = dict(model._modules)
    clone._parameters = {
        name: None if p is None else nn.Parameter(p.detach().clone(), p.requires_grad)
        for name, p in model._parameters.items()
    }
    for name in ("image_head", "text_head"):
        clone._modules[name] = copy.deepcopy(model._modules[name])
    return clone


def fits_general(shape: CLIPConfig) -> bool:
    """Whether heads of this shape can start from those of `general`: the same towers and
    embeddings.
    """
    try:
        config = json.loads(boxed_files(GENERAL)[CONFIG])["model"]
    except (UserError, ValueError, KeyError):
        return False
    trained_shape = CLIPConfig.from_dict(config)
    hidden = trained_shape.image_head.hidden
    wide_enough = min(shape.image_head.hidden, shape.text_head.hidden) >= hidden
    return wide_enough and all(
        getattr(trained_shape, name) == getattr(shape, name) for name in SAME_AS_GENERAL
    )


def general_heads(shape: CLIPConfig) -> Tensors:
    """The heads and the temperature of `general`, with a hidden layer as wide as that of the shape.

    New hidden units have random inputs and no outputs yet, so the heads compute the same.
    """
    assert GENERAL in BOXED
    heads = {key: t.float() for key, t in tensors_from_bytes(boxed_files(GENERAL)[HEADS]).items()}
    draw = torch.Generator().manual_seed(0)
    for side in ("image_head", "text_head"):
        hidden = getattr(shape, side).hidden
        for part in WIDER_PARTS:
            weights = heads[f"{side}.{part}"]
            more = torch.zeros(hidden - len(weights), *weights.shape[1:])
            if weights.ndim == 2:
                more.normal_(std=weights.shape[1] ** -0.5, generator=draw)
            heads[f"{side}.{part}"] = torch.cat([weights, more])
        weights = heads[f"{side}.{NARROW_PART}"]
        more = torch.zeros(len(weights), hidden - weights.shape[1])
        heads[f"{side}.{NARROW_PART}"] = torch.cat([weights, more], dim=1)
    return heads


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
