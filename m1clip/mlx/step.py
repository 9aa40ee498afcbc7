"""The training step in MLX. Loop, batches, schedule and checkpoints are those of torch.

Weights are copied to torch when they are read. Arrays have the names and layout of the torch
tensors, so that a checkpoint of one device continues on another.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import mlx.core as mx
import numpy as np
import torch
from torch import Tensor

from m1clip.config import Config
from m1clip.data.loader import Batch
from m1clip.errors import UserError
from m1clip.formatting import ceil_div
from m1clip.hardware.timing import FORWARD_AND_BACKWARD, Phases
from m1clip.losses.batch_accuracy import MAX_IMAGES
from m1clip.losses.positives import ALL, captions_with_positives, same_image_or_caption
from m1clip.losses.registry import LOSSES, Ids, text_contrast_rows
from m1clip.losses.run_loss import RunLoss
from m1clip.mlx.model import Array, Arrays, encoder
from m1clip.model.blocks import model_layers
from m1clip.model.clip import CLIP, MAX_LOGIT_SCALE
from m1clip.model.heads import FEATURE_DROPOUT, dropout_mask
from m1clip.optimizers import OPTIMIZERS
from m1clip.training.compose import GradientCheck, TrainStep, drop_gradients
from m1clip.training.encode import DONE, Mark, ignore_mark, normalized_pixels, split
from m1clip.training.muon import MUON_EPS, QUINTICS
from m1clip.training.oom import StepAttempts
from m1clip.training.optim import Optimizer
from m1clip.training.step import StepParts, StepResult, parts_for_check
from m1clip.training.step_analyses import LazyTensors, Probe, StepView
from m1clip.training.torch_optimizers import ADAMW_BETAS, ADAMW_EPS
from m1clip.training.transfer import ModelInit

Group = Literal["weights", "moments"]
STATE_GROUPS: tuple[Group, Group] = ("weights", "moments")
Side = Literal["image", "text"]
SIDES: tuple[Side, Side] = ("image", "text")
LOGIT_SCALE = "logit_scale"
Chunks = dict[Side, list[tuple[slice, Arrays]]]  # rows of a batch, and the inputs of an encoder
CLIP_EPS = 1e-6  # of torch's clip_grad_norm_


def check_supported(config: Config, model_init: ModelInit) -> None:
    """Raise UserError for a run that the MLX step cannot train."""
    transfer = config.transfer
    own_kinds = {"image": "vit", "text": "transformer"}
    trained = list(zip(SIDES, model_init.trainable, strict=True))
    foreign = [
        side
        for side, on in trained
        if on and getattr(model_init.config, f"{side}_tower").kind != own_kinds[side]
    ]
    optimizer = config.optim.optimizer
    unsupported = {
        f"--optimizer {optimizer}": not OPTIMIZERS[optimizer].in_mlx,
        # The step does not compute the gradient of a bias.
        f"--loss {config.train.loss}": LOSSES[config.train.loss].needs_bias,
        "a model with a logit bias": model_init.config.logit_bias,
        "--teacher": transfer.teacher is not None,
        "--lora": transfer.lora > 0,
        "--cutmix": bool(config.data.cutmix),
        "--members": model_init.config.members > 1,
        "--compile (the step is always compiled)": config.model.compile,
        f"training a pretrained {' and '.join(foreign)} tower": bool(foreign),
    }
    for feature, is_requested in unsupported.items():
        if is_requested:
            raise UserError(f"--device mlx does not support {feature}; use --device mps or cpu")


def to_mlx(tensor: Tensor) -> Array:
    return mx.array(tensor.detach().cpu().contiguous().numpy())


def to_torch(array: Array) -> Tensor:
    return torch.from_numpy(np.array(array))


class MLXOps:
    """The operations of a row term (losses/registry.Ops) in MLX."""

    @staticmethod
    def cast(x: Array, like: Array) -> Array:
        """Convert to the dtype of another array, or to float32 if that is wider."""
        return x.astype(mx.float32 if like.dtype in (mx.bfloat16, mx.float16) else like.dtype)

    @staticmethod
    def log_softmax(x: Array) -> Array:
        """Normalize each row."""
        return x - MLXOps.log_sum_exp(x)

    @staticmethod
    def log_sum_exp(x: Array) -> Array:
        """Return the logarithm of the summed exponentials of each row."""
        return mx.logsumexp(x, axis=1, keepdims=True)

    @staticmethod
    def log_sigmoid(x: Array) -> Array:
        """Take the logarithm of the sigmoid, without overflow."""
        return -mx.logaddexp(mx.zeros_like(x), -x)

    @staticmethod
    def masked_fill(x: Array, mask: Array, value: float) -> Array:
        """Replace the elements where the mask is true."""
        return mx.where(mask, mx.array(value, dtype=x.dtype), x)


def run_loss_in_mlx(
    loss: RunLoss, image: Array, text: Array, scale: Array, bias: Array | None, labels: Arrays
) -> Array:
    """Compute `RunLoss.value` without a teacher; `labels` are those of `loss_labels`."""
    logits = scale * image @ text.T
    if loss.objective.needs_bias:
        logits = logits + bias
    total = loss.objective.of_logits(MLXOps(), logits, labels["positive"])
    if loss.text_contrast:
        images = labels["images"]
        captions = labels["captions"]
        text_logits = scale * text @ text.T
        same_image = images[:, None] == images
        same_caption = captions[:, None] == captions
        contrast = text_contrast_rows(MLXOps(), text_logits, same_image, same_caption)
        total = total + loss.text_contrast * contrast / labels["captions_with_positives"]
    return total


def accuracy_in_mlx(image: Array, text: Array, labels: Arrays) -> Array:
    """Compute `accuracy_within_batch`: (2,) the accuracy within a batch, and its chance level."""
    matching = labels["matching"]
    nearest = (image[: len(matching)] @ text.T).argmax(axis=1, keepdims=True)
    hits = mx.take_along_axis(matching, nearest, axis=1)
    return mx.stack([hits.mean(), matching.mean()])


def loss_labels(loss: RunLoss, ids: Ids) -> Arrays:
    """Return what the loss and the accuracy need of a batch beside its features."""
    labels = {"positive": to_mlx(loss.objective.positives(ids, ALL, ALL))}
    labels["matching"] = to_mlx(same_image_or_caption(ids, ALL, ALL)[:MAX_IMAGES].float())
    if loss.text_contrast:
        labels["images"] = to_mlx(ids.sample_ids[ids.image_index])
        labels["captions"] = to_mlx(ids.caption_ids)
        labels["captions_with_positives"] = to_mlx(captions_with_positives(ids))
    return labels


def _ids(batch: Batch) -> Ids:
    return Ids(batch.sample_ids, batch.caption_ids, batch.image_index)


def orthogonalize(x: Array) -> Array:
    """Bring the singular values of (k, m, n) with m <= n close to 1, as `muon.orthogonalize`."""

    def norm(x: Array) -> Array:
        return mx.maximum(mx.sqrt((x * x).sum(axis=(1, 2), keepdims=True)), MUON_EPS)

    def factor_of(gram: Array, square: Array, quintic: tuple[float, float, float]) -> Array:
        a, b, c = quintic
        return b * gram + c * square + a * mx.eye(gram.shape[1], dtype=gram.dtype)

    x = x / norm(x)
    gram = x @ x.swapaxes(1, 2)
    square = gram @ gram
    bound = mx.maximum(mx.sqrt(norm(square)), MUON_EPS)
    gram = gram / bound
    is_wide = x.shape[2] >= 2 * x.shape[1]
    factor = factor_of(gram, square / (bound * bound), QUINTICS[0]) * mx.rsqrt(bound)
    for number, quintic in enumerate(QUINTICS[1:], start=1):
        if is_wide and number % 2:  # two iterations on the small Gram matrix
            gram = factor @ gram @ factor * (bound if number == 1 else 1)
            factor = factor_of(gram, gram @ gram, quintic) @ factor
            continue
        x = factor @ x
        gram = x @ x.swapaxes(1, 2)
        factor = factor_of(gram, gram @ gram, quintic)
    return factor @ x


@dataclass(frozen=True)
class GroupUpdate:
    """What the update of a parameter group reads, and the weights and moments that it replaces."""

    part: str  # its name
    names: list[str]
    weights: Arrays
    moments: Arrays  # part/parameter/moment, as in Optimizer.tensors
    grads: Arrays
    lr: Array
    options: dict[str, Any]  # torch's parameter group
    corrections: tuple[Array, Array]  # of AdamW's moments, which begin at 0
    dtype: Any  # of Muon's matmuls

    def key(self, name: str, moment: str) -> str:
        """Return the key of a moment of a parameter."""
        return moment_key(self.part, name, moment)


def moment_key(part: str, name: str, moment: str) -> str:
    """Return the key of a moment as in Optimizer.tensors, which are the keys of a checkpoint."""
    return f"{part}/{name}/{moment}"


def adamw(group: GroupUpdate) -> None:
    """Update weights and moments as torch.optim.AdamW, after the weight decay."""
    first, second = ADAMW_BETAS
    weights = group.weights
    moments = group.moments
    for name in group.names:
        grad = group.grads[name]
        mean = group.key(name, "exp_avg")
        square = group.key(name, "exp_avg_sq")
        moments[mean] = moments[mean] + (1 - first) * (grad - moments[mean])
        moments[square] = second * moments[square] + (1 - second) * grad * grad
        denominator = mx.sqrt(moments[square] / group.corrections[1]) + ADAMW_EPS
        step_size = group.lr / group.corrections[0]
        weights[name] = weights[name] - step_size * moments[mean] / denominator


def muon(group: GroupUpdate) -> None:
    """Update weights and moments as `muon.Muon`, after the weight decay."""
    weights = group.weights
    moments = group.moments
    momentum = group.options["momentum"]
    stacks: dict[tuple[int, ...], list[tuple[str, Array]]] = {}
    for name in group.names:
        key = group.key(name, "momentum_buffer")
        grad = group.grads[name]
        moments[key] = moments[key] + (1 - momentum) * (grad - moments[key])
        update = (grad + momentum * (moments[key] - grad)).reshape(len(grad), -1)
        stacks.setdefault(tuple(sorted(update.shape)), []).append((name, update))
    for members in stacks.values():
        tall = [len(update) > update.shape[1] for _, update in members]
        wide_matrices = [
            update.T if turned else update
            for (_, update), turned in zip(members, tall, strict=True)
        ]
        stack = orthogonalize(mx.stack(wide_matrices).astype(group.dtype)).astype(mx.float32)
        for (name, update), x, turned in zip(members, stack, tall, strict=True):
            scale = group.lr * math.sqrt(max(1.0, len(update) / update.shape[1]))
            weights[name] = weights[name] - scale * (x.T if turned else x).reshape(
                weights[name].shape
            )


class PartUpdate(NamedTuple):
    """How MLX updates the parameters of a part of m1clip.optimizers."""

    moments: tuple[str, ...]  # of a parameter, named as in torch
    counts_steps: bool  # whether torch's state of a parameter has its number of updates, `step`
    apply: Callable[[GroupUpdate], None]


# The parts with `in_mlx`, by name; any other one is rejected by `check_supported`.
UPDATES = {
    "adamw": PartUpdate(("exp_avg", "exp_avg_sq"), counts_steps=True, apply=adamw),
    "muon": PartUpdate(("momentum_buffer",), counts_steps=False, apply=muon),
}


class MLXStep:
    """The plain step in MLX, with the signature of `train_step` without its parts.

    `read` copies the weights and moments to torch's model and optimizer.
    """

    def __init__(self, parts: StepParts, only_gradients: bool = False) -> None:
        """`only_gradients` updates nothing, and stores the gradients in torch's parameters."""
        self.parts = parts
        self._only_gradients = only_gradients
        self.phases: Phases | None = None  # of a run: synchronized steps are timed by stage
        # Weights and moments; None: torch's are current.
        self._arrays: dict[str, Arrays] | None = None
        self._stale: set[str] = set()  # of those, the ones that torch has older values of
        self._grads: Arrays = {}
        self._accuracy: Array = mx.zeros(2)  # within the last batch, and its chance level
        self.dtype = mx.bfloat16 if parts.encoder.precision == "bf16" else mx.float32
        self._updates = 0  # of AdamW, which every parameter counts
        self._take_weights()
        checkpointing = parts.config.model.grad_checkpointing
        encode = {
            side: encoder(parts.model.config, side, self.dtype, checkpointing) for side in SIDES
        }
        run_loss = parts.loss

        def loss_of(features: Arrays, labels: Arrays) -> tuple[Array, Array]:
            """Return the loss, of which gradients are computed, and the accuracy."""
            scale = mx.exp(mx.minimum(features[LOGIT_SCALE], MAX_LOGIT_SCALE))
            image = features["image"]
            text = features["text"]
            loss = run_loss_in_mlx(run_loss, image, text, scale, None, labels)
            return loss, accuracy_in_mlx(image, text, labels)

        def full_loss(
            weights: Arrays, fixed: Arrays, inputs: dict[Side, Arrays], labels: Arrays
        ) -> tuple[Array, Array]:
            image, text = (encode[side](weights | fixed, inputs[side]) for side in SIDES)
            return loss_of(
                {"image": image, "text": text, LOGIT_SCALE: weights[LOGIT_SCALE]}, labels
            )

        def weighted_sum(side: Side) -> Callable[..., Array]:
            """Return the sum of features, weighted by the gradients of the loss by features.

            Its gradient by the weights is that of the loss.
            """

            def compute(weights: Arrays, fixed: Arrays, inputs: Arrays, gradient: Array) -> Array:
                return (encode[side](weights | fixed, inputs) * gradient).sum()

            return compute

        self._full = mx.compile(mx.value_and_grad(full_loss))
        self._encoders = {
            side: mx.compile(lambda w, fixed, x, e=encode[side]: e(w | fixed, x)) for side in SIDES
        }
        self._feature_gradients = mx.compile(mx.value_and_grad(loss_of))
        self._weight_gradients = {side: mx.compile(mx.grad(weighted_sum(side))) for side in SIDES}
        self._update = mx.compile(self._apply_updates)

    def _take_weights(self) -> None:
        """Find out which weights are trained, and copy those that are not."""
        model = self.parts.model
        named = dict(model.named_parameters())
        self._trained = {name: p for name, p in named.items() if p.requires_grad}
        fixed = [*named.items(), *model.named_buffers()]
        # Frozen towers are not part of the step: their features are its inputs.
        unused = [
            f"{side}_tower."
            for side in SIDES
            if not any(n.startswith(f"{side}_tower.") for n in self._trained)
        ]
        self._fixed = {
            n: to_mlx(t)
            for n, t in fixed
            if n not in self._trained and not n.startswith(tuple(unused))
        }

    def read(self, group: Group) -> None:
        """Copy a group of arrays to torch, if newer."""
        if self._arrays is None or group not in self._stale:
            return
        self._stale.discard(group)
        values = {name: to_torch(array) for name, array in self._arrays[group].items()}
        if group == "moments":
            for part, _, options in self._groups():
                if UPDATES[part].counts_steps:
                    for name in options["param_names"]:
                        values[moment_key(part, name, "step")] = torch.tensor(float(self._updates))
            self.parts.update.optimizer.load_tensors(values)
            return
        with torch.no_grad():
            for name, value in values.items():
                self._trained[name].copy_(value)

    def _state(self) -> dict[str, Arrays]:
        """Return the arrays, read from torch at the start and after anything there was replaced."""
        if self._arrays is None:
            weights = {name: to_mlx(p) for name, p in self._trained.items()}
            saved = self.parts.update.optimizer.tensors()
            self._updates = max(
                (int(value) for key, value in saved.items() if key.endswith("/step")), default=0
            )
            moments = {}
            for part, _, options in [] if self._only_gradients else self._groups():
                kinds = UPDATES[part].moments
                for name, kind in itertools.product(options["param_names"], kinds):
                    key = moment_key(part, name, kind)
                    moments[key] = (
                        to_mlx(saved[key]) if key in saved else mx.zeros_like(weights[name])
                    )
            self._arrays = {"weights": weights, "moments": moments}
        return self._arrays

    def reset(self) -> None:
        """Copy everything to torch, where it is about to be replaced."""
        for group in STATE_GROUPS:
            self.read(group)
        self._arrays = None
        self._grads = {}

    def _groups(self) -> list[tuple[str, str, dict[str, Any]]]:
        """List the part, a key and the options of each parameter group."""
        return [
            (name, f"{name}/{number}", group)
            for name, part in self.parts.update.optimizer.parts.items()
            for number, group in enumerate(part.param_groups)
        ]

    def __call__(
        self,
        batch: Batch,
        step: int,
        micro_batch: int | None = None,
        mark: Mark = ignore_mark,
        probe: Probe | None = None,
    ) -> StepResult:
        """Train on one batch."""
        loss = self.compute_gradients(batch, step, micro_batch, mark)
        mark("optimizer")  # before the probe, whose errors are not repeated with less memory
        if probe is not None:
            probe(self._view(step))
        grad_norm = torch.zeros(()) if self._only_gradients else self._update_weights(loss)
        mark(DONE)
        return StepResult(loss, grad_norm, to_torch(self._accuracy))

    def _view(self, step: int) -> StepView:
        """Return a view of the gradients and current weights, each copied to torch when read."""
        grads = self._grads
        return StepView(
            step,
            LazyTensors(grads, lambda name: to_torch(grads[name])),
            LazyTensors(grads, lambda name: to_torch(self._state()["weights"][name])),
            model_layers(self.parts.model),
        )

    def compute_gradients(
        self, batch: Batch, step: int, micro_batch: int | None = None, mark: Mark = ignore_mark
    ) -> Tensor:
        """Run forward and backward of a batch, and return the loss."""
        mark("preprocess")
        weights = self._state()["weights"]
        size = self.parts.config.train.micro_batch if micro_batch is None else micro_batch
        if not self.parts.world.is_single:
            (loss, self._accuracy), self._grads = self._gradients_on_ranks(
                weights, batch, step, size or len(batch), mark
            )
        elif 0 < size < len(batch):
            (loss, self._accuracy), self._grads = self._gradients_in_micro_batches(
                weights, batch, step, size, mark
            )
        else:
            labels = loss_labels(self.parts.loss, _ids(batch))
            sizes: dict[Side, int] = {"image": len(batch), "text": len(batch.caption_ids)}
            inputs = {
                side: self._inputs(side, batch, slice(0, size), step)
                for side, size in sizes.items()
            }
            if self.phases is not None and self.phases.is_synchronized:
                mark("forward")  # a pass of its own, only to be timed
                mx.eval(
                    [self._encoders[side](weights, self._fixed, inputs[side]) for side in SIDES]
                )
            mark(FORWARD_AND_BACKWARD)
            (loss, self._accuracy), self._grads = self._full(weights, self._fixed, inputs, labels)
        mx.eval(loss, self._accuracy, self._grads)
        if self._only_gradients:
            for name, p in self._trained.items():
                p.grad = to_torch(self._grads[name]).to(p.device)
        return torch.tensor(loss.item())

    def _inputs(self, side: Side, batch: Batch, rows: slice, step: int) -> Arrays:
        """Return the inputs of one side's encoder for some rows, with torch's dropout masks."""
        features = batch.image_features if side == "image" else batch.text_features
        if features is not None:
            inputs = {"features": features[rows]}
        elif side == "image":
            pixels = normalized_pixels(batch, self.parts.encoder.preprocess, rows)
            inputs = {"pixels": pixels.permute(0, 2, 3, 1)}  # (n, size, size, 3)
            if batch.kept_patches is not None:
                inputs["kept"] = batch.kept_patches[rows]
        else:
            inputs = {"tokens": batch.texts(rows)}
        head = getattr(self.parts.model, f"{side}_head")
        keys = self.parts.encoder.dropout_keys(batch, step)[side == "text"]
        if keys is not None and head.dropout:
            widths = head.up.in_features, head.down.in_features
            inputs["feature_mask"] = dropout_mask(
                keys[rows], widths[0], FEATURE_DROPOUT * head.dropout
            )
            inputs["hidden_mask"] = dropout_mask(~keys[rows], widths[1], head.dropout)
        return {name: to_mlx(tensor) for name, tensor in inputs.items()}

    def _gradients_in_micro_batches(
        self, weights: Arrays, batch: Batch, step: int, size: int, mark: Mark
    ) -> tuple[tuple[Array, Array], Arrays]:
        """Return loss, accuracy and gradients, computed as in encode.EncodedInChunks."""
        chunks = self._chunks(batch, step, size)
        mark("forward")
        features = self._features(weights, chunks)
        labels = loss_labels(self.parts.loss, _ids(batch))
        mark(FORWARD_AND_BACKWARD)  # each chunk is re-encoded
        loss_and_accuracy, by_features = self._feature_gradients(features, labels)
        return loss_and_accuracy, self._weight_sums(weights, chunks, by_features)

    def _gradients_on_ranks(
        self, weights: Arrays, batch: Batch, step: int, size: int, mark: Mark
    ) -> tuple[tuple[Array, Array], Arrays]:
        """Return loss, accuracy and gradients of the rows of all ranks, gathered as torch tensors.

        Every rank computes the loss of all rows, which costs little beside the towers, and
        backpropagates to its own.
        """
        world = self.parts.world
        ranks = world.ranks
        with world.synchronized(len(batch), len(batch.caption_ids)) as sizes:
            chunks = self._chunks(batch, step, size)
            mark("forward")
            features = self._features(weights, chunks)
        gathered = world.gather(batch, [to_torch(features[side]) for side in SIDES], sizes)
        with world.synchronized():
            for side, rows in zip(SIDES, gathered.features, strict=True):
                features[side] = to_mlx(rows)
            ids = Ids(gathered.sample_ids, gathered.caption_ids, gathered.image_index)
            labels = loss_labels(self.parts.loss, ids)
            mark(FORWARD_AND_BACKWARD)  # each chunk is re-encoded
            (loss, accuracy), by_features = self._feature_gradients(features, labels)
            own_gradients = {
                "image": by_features["image"][gathered.images],
                "text": by_features["text"][gathered.texts],
                # Complete on every rank, and added below.
                LOGIT_SCALE: by_features[LOGIT_SCALE] / ranks.size,
            }
            grads = self._weight_sums(weights, chunks, own_gradients)
        sums = [to_torch(loss / ranks.size), *map(to_torch, grads.values())]
        ranks.all_reduce(sums)
        total, *added = map(to_mlx, sums)
        return (total, accuracy), dict(zip(grads, added, strict=True))

    def _chunks(self, batch: Batch, step: int, size: int) -> Chunks:
        """Return the inputs of both encoders, `size` images and their captions at a time."""
        images = len(batch)
        captions = len(batch.caption_ids)
        counts: dict[Side, tuple[int, int]] = {
            "image": (images, size),
            "text": (captions, ceil_div(size * captions, images)),
        }
        return {
            side: [
                (rows, self._inputs(side, batch, rows, step))
                for rows in split(slice(0, count), chunk_size)
            ]
            for side, (count, chunk_size) in counts.items()
        }

    def _features(self, weights: Arrays, chunks: Chunks) -> Arrays:
        """Compute the inputs of the loss: features of all rows without a graph, and the scale."""
        features: Arrays = {LOGIT_SCALE: weights[LOGIT_SCALE]}
        for side in SIDES:
            encoded = []
            for _, inputs in chunks[side]:
                encoded.append(self._encoders[side](weights, self._fixed, inputs))
                mx.eval(encoded[-1])
            features[side] = mx.concatenate(encoded)
        return features

    def _weight_sums(self, weights: Arrays, chunks: Chunks, by_features: Arrays) -> Arrays:
        """Sum the gradients of the weights over all chunks, given those of the features."""
        total = {LOGIT_SCALE: by_features[LOGIT_SCALE]}
        for side in SIDES:
            for rows, inputs in chunks[side]:
                gradients = self._weight_gradients[side](
                    weights, self._fixed, inputs, by_features[side][rows]
                )
                total = {
                    name: grad + total[name] if name in total else grad
                    for name, grad in gradients.items()
                }
                mx.eval(total)
        return total

    def _update_weights(self, loss: Tensor) -> Tensor:
        """Clip and update the weights; nothing changes if loss or gradients are not finite."""
        squares = sum((grad * grad).sum() for grad in self._grads.values())
        grad_norm: Any = mx.sqrt(squares).item()
        if math.isfinite(loss.item()) and math.isfinite(grad_norm):
            self._updates += 1
            max_norm = self.parts.update.grad_clip or math.inf
            numbers: dict[str, Any] = {
                "first": 1 - ADAMW_BETAS[0] ** self._updates,
                "second": 1 - ADAMW_BETAS[1] ** self._updates,
                "clip": min(1.0, max_norm / (grad_norm + CLIP_EPS)),
            }
            numbers |= {key: group["lr"] for _, key, group in self._groups()}
            # As inputs, not constants: the compiled function is the same for every step.
            state = self._state()
            scalars = {name: mx.array(value) for name, value in numbers.items()}
            self._arrays = self._update(state, self._grads, scalars)
            del state  # its memory is reused
            mx.eval(self._arrays)
            self._stale = set(self._arrays)
        self._grads = {}
        return torch.tensor(grad_norm)

    def _apply_updates(
        self, state: dict[str, Arrays], grads: Arrays, numbers: Arrays
    ) -> dict[str, Arrays]:
        weights = dict(state["weights"])
        moments = dict(state["moments"])
        grads = {name: grad * numbers["clip"] for name, grad in grads.items()}
        corrections = (numbers["first"], numbers["second"])
        for part, key, options in self._groups():
            names = options["param_names"]
            lr = numbers[key]
            for name in names:
                weights[name] = weights[name] * (1 - lr * options["weight_decay"])
            group = GroupUpdate(
                part, names, weights, moments, grads, lr, options, corrections, self.dtype
            )
            UPDATES[part].apply(group)
        weights[LOGIT_SCALE] = mx.clip(weights[LOGIT_SCALE], 0.0, MAX_LOGIT_SCALE)
        return {"weights": weights, "moments": moments}


@dataclass
class MLXTrainStep(TrainStep):
    """The training step of a run in MLX. Torch's model and optimizer are updated when read."""

    engine: MLXStep = field(kw_only=True)

    @property
    def model(self) -> CLIP:
        """The torch model, with the current weights."""
        self.engine.read("weights")
        return self.parts.model

    @property
    def optimizer(self) -> Optimizer:
        """The torch optimizers, with the current state."""
        self.engine.read("moments")
        return self.parts.update.optimizer

    def reset(self) -> None:
        """Copy everything to torch, where it is about to be replaced."""
        self.engine.reset()

    def for_check(self, model: CLIP) -> GradientCheck:
        """Return a check of the gradients of a model copy, stored in torch's parameters."""
        parts = parts_for_check(self.parts, model)
        return GradientCheck(parts, MLXStep(parts, only_gradients=True))

    def orthogonalize(self, x: Tensor) -> Tensor:
        """Muon's matmuls (k, m, n) as MLX computes them."""
        matrices = to_mlx(x.float()).astype(self.engine.dtype)
        return to_torch(orthogonalize(matrices).astype(mx.float32))


def compose_mlx_step(parts: StepParts) -> MLXTrainStep:
    """Compose the step of a run in MLX, repeated with a smaller micro-batch if memory runs out."""
    engine = MLXStep(parts)

    def clear() -> None:
        engine.reset()
        drop_gradients(parts)

    # Its phases are timed in synchronized steps only: MLX computes when values are needed.
    phases = Phases(parts.device.kind)
    engine.phases = phases
    attempts = StepAttempts(parts.config.train.micro_batch, clear=clear, mark=phases.mark)
    return MLXTrainStep(parts, engine, attempts, phases, engine=engine)
