"""The training step in MLX. Loop, batches, schedule and checkpoints stay torch's; weights are copied when read.

Arrays have the names and layout of the torch tensors: a checkpoint of one device continues on another.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import mlx.core as mx
import numpy as np
import torch
from torch import Tensor

from m1clip.config import Config
from m1clip.data.loader import Batch
from m1clip.errors import UserError
from m1clip.hardware.device import Device, Precision
from m1clip.losses.positives import ALL, captions_with_positives
from m1clip.losses.registry import Ids, text_contrast_rows
from m1clip.losses.run_loss import RunLoss
from m1clip.mlx.model import Array, Arrays, encoder
from m1clip.model.clip import CLIP, MAX_LOGIT_SCALE
from m1clip.model.heads import FEATURE_DROPOUT, dropout_mask
from m1clip.training.encode import normalized_pixels, split
from m1clip.training.muon import EPS as MUON_EPS
from m1clip.training.muon import QUINTICS
from m1clip.training.optim import BETAS, EPS, OPTIMIZER_PARTS, Optimizer
from m1clip.training.step import Probe, StepResult, TrainStep
from m1clip.training.transfer import Start
from m1clip.training.update import GRAD_CLIP_NORM

Side = Literal["image", "text"]
SIDES: tuple[Side, Side] = ("image", "text")
SCALE = "logit_scale"
# Losses that this step trains with. A loss with a bias would need its gradient too.
LOSSES_IN_MLX = ("infonce", "multi-positive")
CLIP_EPS = 1e-6  # of torch's clip_grad_norm_
# Of a parameter, named as in torch.
MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "muon": ("momentum_buffer",)}


def check_supported(config: Config, start: Start) -> None:
    """Raise UserError for a run that the MLX step cannot train."""
    transfer, own = config.transfer, {"image": "vit", "text": "transformer"}
    trained = list(zip(SIDES, start.trainable, strict=True))
    foreign = [
        side
        for side, on in trained
        if on and getattr(start.config, f"{side}_tower").kind != own[side]
    ]
    optimizer = config.optim.optimizer
    unsupported = {
        f"--optimizer {optimizer}": not set(OPTIMIZER_PARTS[optimizer]) <= MOMENTS.keys(),
        f"--loss {config.train.loss}": config.train.loss not in LOSSES_IN_MLX,
        "a model with a logit bias": start.config.logit_bias,
        "--teacher": transfer.teacher is not None,
        "--compile (the step is always compiled)": config.model.compile,
        f"training a pretrained {' and '.join(foreign)} tower": bool(foreign),
    }
    for what, asked in unsupported.items():
        if asked:
            raise UserError(f"--device mlx does not support {what}; use --device mps or cpu")


def to_mlx(tensor: Tensor) -> Array:
    return mx.array(tensor.detach().cpu().contiguous().numpy())


def to_torch(array: Array) -> Tensor:
    return torch.from_numpy(np.array(array))


class MLXOps:
    """The operations of a row term (losses/registry.Ops) in MLX."""

    @staticmethod
    def cast(x: Array, like: Array) -> Array:
        """Convert to the dtype of another array."""
        return x.astype(like.dtype)

    @staticmethod
    def log_softmax(x: Array) -> Array:
        """Normalize each row."""
        return x - mx.logsumexp(x, axis=1, keepdims=True)

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


def loss_labels(loss: RunLoss, ids: Ids) -> Arrays:
    """Collect what the loss needs to know of a batch beside its features."""
    labels = {"positive": to_mlx(loss.objective.positives(ids, ALL, ALL))}
    if loss.text_contrast:
        labels["images"] = to_mlx(ids.sample_ids[ids.image_index])
        labels["captions"] = to_mlx(ids.caption_ids)
        labels["captions_with_positives"] = to_mlx(captions_with_positives(ids))
    return labels


def orthogonalize(x: Array) -> Array:
    """As `muon.orthogonalize`: (k, m, n) with m <= n -> singular values close to 1."""

    def norm(x: Array) -> Array:
        return mx.maximum(mx.sqrt((x * x).sum(axis=(1, 2), keepdims=True)), MUON_EPS)

    def factor_of(gram: Array, square: Array, quintic: tuple[float, float, float]) -> Array:
        a, b, c = quintic
        return b * gram + c * square + a * mx.eye(gram.shape[1], dtype=gram.dtype)

    x = x / norm(x)
    gram = x @ x.swapaxes(1, 2)
    square = gram @ gram
    bound = mx.maximum(mx.sqrt(norm(square)), MUON_EPS)
    gram, wide = gram / bound, x.shape[2] >= 2 * x.shape[1]
    factor = factor_of(gram, square / (bound * bound), QUINTICS[0]) * mx.rsqrt(bound)
    for number, quintic in enumerate(QUINTICS[1:], start=1):
        if wide and number % 2:  # two iterations on the small Gram matrix
            gram = factor @ gram @ factor * (bound if number == 1 else 1)
            factor = factor_of(gram, gram @ gram, quintic) @ factor
            continue
        x = factor @ x
        gram = x @ x.swapaxes(1, 2)
        factor = factor_of(gram, gram @ gram, quintic)
    return factor @ x


def adamw(
    names: list[str],
    weights: Arrays,
    moments: Arrays,
    grads: Arrays,
    lr: Array,
    correction: tuple[Array, Array],
) -> None:
    """Update weights and moments as torch.optim.AdamW, after the weight decay."""
    first, second = BETAS
    for name in names:
        (mean, square), grad = (f"adamw/{name}/{key}" for key in MOMENTS["adamw"]), grads[name]
        moments[mean] = moments[mean] + (1 - first) * (grad - moments[mean])
        moments[square] = second * moments[square] + (1 - second) * grad * grad
        denominator = mx.sqrt(moments[square] / correction[1]) + EPS
        weights[name] = weights[name] - lr / correction[0] * moments[mean] / denominator


def muon(
    names: list[str],
    weights: Arrays,
    moments: Arrays,
    grads: Arrays,
    lr: Array,
    momentum: float,
    dtype: Any,
) -> None:
    """Update weights and moments as `muon.Muon`, after the weight decay; its products are in `dtype`."""
    stacks: dict[tuple[int, ...], list[tuple[str, Array]]] = {}
    for name in names:
        key, grad = f"muon/{name}/momentum_buffer", grads[name]
        moments[key] = moments[key] + (1 - momentum) * (grad - moments[key])
        update = (grad + momentum * (moments[key] - grad)).reshape(len(grad), -1)
        stacks.setdefault(tuple(sorted(update.shape)), []).append((name, update))
    for members in stacks.values():
        tall = [len(update) > update.shape[1] for _, update in members]
        wide = [
            update.T if turned else update
            for (_, update), turned in zip(members, tall, strict=True)
        ]
        stack = orthogonalize(mx.stack(wide).astype(dtype)).astype(mx.float32)
        for (name, update), x, turned in zip(members, stack, tall, strict=True):
            scale = lr * math.sqrt(max(1.0, len(update) / update.shape[1]))
            weights[name] = weights[name] - scale * (x.T if turned else x).reshape(
                weights[name].shape
            )


class MLXStep(TrainStep):
    """TrainStep with gradients and updates in MLX. `model` and `optimizer` are torch's, current when read."""

    def __init__(
        self, model: CLIP, config: Config, device: Device, precision: Precision, *others: Any
    ) -> None:
        self._arrays: dict[str, Arrays] | None = (
            None  # weights and moments; None: torch's are current
        )
        self._stale: set[str] = set()  # of those, the ones that torch has older values of
        self._grads: Arrays = {}
        self._fills_gradients, self._precision = False, precision
        self._dtype = dtype = mx.bfloat16 if precision == "bf16" else mx.float32
        self._updates = 0  # of AdamW, which every parameter counts
        super().__init__(model, config, device, precision, *others)
        self._take_weights()
        encode = {
            side: encoder(model.config, side, dtype, config.model.grad_checkpointing)
            for side in SIDES
        }
        run_loss = self.parts.loss

        def loss_of(features: Arrays, labels: Arrays) -> Array:
            scale = mx.exp(mx.minimum(features[SCALE], MAX_LOGIT_SCALE))
            image = features["image"]
            text = features["text"]
            return run_loss_in_mlx(run_loss, image, text, scale, None, labels)

        def full_loss(
            weights: Arrays, fixed: Arrays, inputs: dict[str, Arrays], labels: Arrays
        ) -> Array:
            image, text = (encode[side](weights | fixed, inputs[side]) for side in SIDES)
            return loss_of({"image": image, "text": text, SCALE: weights[SCALE]}, labels)

        def weighted(side: Side) -> Callable[..., Array]:
            """A function of the weights whose gradient is that of the loss, given the loss's gradient by features."""
            return lambda weights, fixed, inputs, by: (
                encode[side](weights | fixed, inputs) * by
            ).sum()

        self._full = mx.compile(mx.value_and_grad(full_loss))
        self._encoders = {
            side: mx.compile(lambda w, fixed, x, e=encode[side]: e(w | fixed, x)) for side in SIDES
        }
        self._feature_gradients = mx.compile(mx.value_and_grad(loss_of))
        self._weight_gradients = {side: mx.compile(mx.grad(weighted(side))) for side in SIDES}
        self._update = mx.compile(self._updated)

    @property
    def model(self) -> CLIP:
        """The torch model, with the current weights."""
        self._read("weights")
        return self.parts.model

    @property
    def optimizer(self) -> Optimizer:
        """The torch optimizers, with the current state."""
        self._read("moments")
        return self.parts.update.optimizer

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

    def _read(self, group: str) -> None:
        """Copy a group of arrays to torch, if newer."""
        if self._arrays is None or group not in self._stale:
            return
        self._stale.discard(group)
        values = {name: to_torch(array) for name, array in self._arrays[group].items()}
        if group == "moments":
            keys = [key.removesuffix("exp_avg") for key in values if key.endswith("/exp_avg")]
            self.parts.update.optimizer.load_tensors(
                values | {f"{key}step": torch.tensor(float(self._updates)) for key in keys}
            )
            return
        with torch.no_grad():
            for name, value in values.items():
                self._trained[name].copy_(value)

    def _state(self) -> dict[str, Arrays]:
        """The arrays; read from torch at the start and after anything there was replaced."""
        if self._arrays is None:
            weights = {name: to_mlx(p) for name, p in self._trained.items()}
            known = self.parts.update.optimizer.tensors()
            self._updates = max(
                (int(value) for key, value in known.items() if key.endswith("/step")), default=0
            )
            moments = {}
            for part, _, group in self._groups():
                for name, kind in itertools.product(group["param_names"], MOMENTS[part]):
                    key = f"{part}/{name}/{kind}"
                    moments[key] = (
                        to_mlx(known[key]) if key in known else mx.zeros_like(weights[name])
                    )
            self._arrays = {"weights": weights, "moments": moments}
        return self._arrays

    def reset_graph(self) -> None:
        """Copy everything to torch, where it is about to be replaced."""
        for group in tuple(self._stale):
            self._read(group)
        self._arrays, self._grads = None, {}

    def _groups(self) -> list[tuple[str, str, dict[str, Any]]]:
        return [
            (name, f"{name}/{number}", group)
            for name, part in self.parts.update.optimizer.parts.items()
            for number, group in enumerate(part.param_groups)
        ]

    def __call__(self, batch: Batch, step: int, probe: Probe | None = None) -> StepResult:
        self.parts.update.optimizer.set_lr(self.schedule(step) * self.lr_factor)
        gradients = partial(self.compute_gradients, batch, step)
        oom = self.oom  # runs them again with a smaller micro-batch if memory runs out
        loss = oom.run(gradients, self.clear, len(batch), step) if oom else gradients()
        if probe is not None:
            probe({name: to_torch(grad) for name, grad in self._grads.items()})
        return StepResult(loss, self.update_weights(loss))

    def compute_gradients(self, batch: Batch, step: int) -> Tensor:
        """Forward and backward of a batch; returns the loss."""
        weights = self._state()["weights"]
        ids = Ids(batch.sample_ids, batch.caption_ids, batch.image_index)
        labels = loss_labels(self.parts.loss, ids)
        if 0 < self.micro_batch < len(batch):
            loss, self._grads = self._micro_batched(weights, batch, labels, step)
        else:
            sizes: dict[Side, int] = {"image": len(batch), "text": len(batch.caption_ids)}
            inputs = {
                side: self._inputs(side, batch, slice(0, size), step)
                for side, size in sizes.items()
            }
            loss, self._grads = self._full(weights, self._fixed, inputs, labels)
        mx.eval(loss, self._grads)
        if self._fills_gradients:
            for name, p in self._trained.items():
                p.grad = to_torch(self._grads[name]).to(p.device)
        return torch.tensor(loss.item())

    def _inputs(self, side: Side, batch: Batch, rows: slice, step: int) -> Arrays:
        """The inputs of one side's encoder for some rows, with the dropout masks of torch's step."""
        features = batch.image_features if side == "image" else batch.text_features
        if features is not None:
            inputs = {"features": features[rows]}
        elif side == "image":
            inputs = {
                "pixels": normalized_pixels(batch, self.parts.encoder.preprocess, rows).permute(
                    0, 2, 3, 1
                )
            }
            inputs |= {} if batch.kept_patches is None else {"kept": batch.kept_patches[rows]}
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

    def _micro_batched(
        self, weights: Arrays, batch: Batch, labels: Arrays, step: int
    ) -> tuple[Array, Arrays]:
        """Loss and gradients with the activations of one micro-batch at a time, as in encode.EncodedInChunks."""
        images, captions, size = len(batch), len(batch.caption_ids), self.micro_batch
        counts: dict[Side, tuple[int, int]] = {
            "image": (images, size),
            "text": (captions, -(-size * captions // images)),
        }
        parts: dict[Side, list[tuple[slice, Arrays]]] = {side: [] for side in SIDES}
        features: Arrays = {SCALE: weights[SCALE]}
        for side, (count, most) in counts.items():
            for rows in split(slice(0, count), most):
                parts[side].append((rows, self._inputs(side, batch, rows, step)))
            encoded = []
            for _, inputs in parts[side]:
                encoded.append(self._encoders[side](weights, self._fixed, inputs))
                mx.eval(encoded[-1])
            features[side] = mx.concatenate(encoded)
        loss, by_features = self._feature_gradients(features, labels)
        total = {SCALE: by_features[SCALE]}
        for side in SIDES:
            for rows, inputs in parts[side]:
                found = self._weight_gradients[side](
                    weights, self._fixed, inputs, by_features[side][rows]
                )
                total = {
                    name: grad + total[name] if name in total else grad
                    for name, grad in found.items()
                }
                mx.eval(total)
        return loss, total

    def update_weights(self, loss: Tensor) -> Tensor:
        """Clip and update the weights; nothing changes if loss or gradients are not finite."""
        grad_norm = mx.sqrt(sum((grad * grad).sum() for grad in self._grads.values())).item()
        if math.isfinite(loss.item()) and math.isfinite(grad_norm):
            self._updates += 1
            numbers: dict[str, Any] = {
                "first": 1 - BETAS[0] ** self._updates,
                "second": 1 - BETAS[1] ** self._updates,
            }
            numbers["clip"] = min(1.0, GRAD_CLIP_NORM / (grad_norm + CLIP_EPS))
            numbers |= {key: group["lr"] for _, key, group in self._groups()}
            # As inputs, not constants: the compiled function is the same for every step.
            state, scalars = (
                self._state(),
                {name: mx.array(value) for name, value in numbers.items()},
            )
            self._arrays = self._update(state, self._grads, scalars)
            del state  # its memory is reused
            mx.eval(self._arrays)
            self._stale = set(self._arrays)
        self._grads = {}
        return torch.tensor(grad_norm)

    def _updated(
        self, state: dict[str, Arrays], grads: Arrays, numbers: Arrays
    ) -> dict[str, Arrays]:
        weights, moments = dict(state["weights"]), dict(state["moments"])
        grads = {name: grad * numbers["clip"] for name, grad in grads.items()}
        for part, key, group in self._groups():
            names, lr = group["param_names"], numbers[key]
            for name in names:
                weights[name] = weights[name] * (1 - lr * group["weight_decay"])
            if part == "muon":
                muon(names, weights, moments, grads, lr, group["momentum"], self._dtype)
            else:
                adamw(names, weights, moments, grads, lr, (numbers["first"], numbers["second"]))
        weights[SCALE] = mx.clip(weights[SCALE], 0.0, MAX_LOGIT_SCALE)
        return {"weights": weights, "moments": moments}

    def orthogonalize(self, x: Tensor) -> Tensor:
        return to_torch(orthogonalize(to_mlx(x.float()).astype(self._dtype)).astype(mx.float32))

    def for_check(self, model: CLIP) -> MLXStep:  # type: ignore[override]  # it has what a check needs
        """This step for a copy of the model, without dropout; gradients are also stored in torch's parameters."""
        step = MLXStep(
            model, self.config, self.device, self._precision, self.parts.encoder.preprocess
        )
        step.parts.encoder.has_dropout = False
        step._fills_gradients = True
        model.eval()
        return step

    def without_teacher(self) -> MLXStep:
        """This step: it supports no distillation."""
        return self

    def nonfinite_rows(self, batch: Batch) -> list[int]:
        self._read("weights")
        return super().nonfinite_rows(batch)
