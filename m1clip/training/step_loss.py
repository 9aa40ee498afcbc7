"""The loss of a training step and its gradients by the features: the only place in a step that knows the loss."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from m1clip.hardware.device import Autocast
from m1clip.losses import OBJECTIVES, Terms, loss_terms, positives, text_contrast
from m1clip.model.clip import CLIP, Features
from m1clip.training.distributed import JointBatch
from m1clip.training.encode import Mark, ignore_mark
from m1clip.training.transfer import TEACHER_WEIGHT, Teacher

MAX_LOGITS = 1 << 26  # a larger loss is computed in blocks; 256 MB of float32


@dataclass(frozen=True)
class StepLoss:
    """Objective, text contrast and distillation of a run."""

    model: CLIP  # for its temperature and bias
    objective: str
    text_contrast: float = 0.0
    teacher: Teacher | None = None
    blockwise_text: bool = False  # whether the loss between captions is computed in blocks of rows

    def __call__(
        self,
        joint: JointBatch,
        is_complete: bool,
        scale_loss: Callable[[Tensor], Tensor] = lambda loss: loss,
        context: Autocast = nullcontext,
        mark: Mark = ignore_mark,
    ) -> tuple[Tensor, list[Tensor]]:
        """The detached loss and its gradients by the features of all rows.

        The parameters of the loss (temperature, bias) get their gradients here. Unless the rows are complete, loss
        and gradients are those of this rank's rows, and add up over the ranks. `context` is the precision of the
        objective.
        """
        for feature in joint.features:
            feature.requires_grad_()
        if is_complete and len(joint.sample_ids) * len(joint.caption_ids) <= MAX_LOGITS:
            loss = self.of_batch(joint, context)
            mark("backward")
            scale_loss(loss).backward()
        else:
            loss = self._in_blocks(joint, scale_loss)
        gradients = [torch.zeros_like(feature) if feature.grad is None else feature.grad for feature in joint.features]
        return loss.detach(), gradients

    def of_batch(self, joint: JointBatch, context: Autocast = nullcontext) -> Tensor:
        """The loss of a complete batch, all logits at once."""
        image, text = joint.features
        ids = (joint.sample_ids, joint.caption_ids, joint.image_index)
        features = Features(image, text, self.model.scale(), self.model.logit_bias)
        with context():
            loss = OBJECTIVES[self.objective](features, positives(self.objective, *ids))
        if self.text_contrast:
            loss = loss + self.text_contrast * text_contrast(features, *ids, self.blockwise_text)
        if self.teacher is not None:
            loss = self.teacher.add_distillation(loss, features, joint.sample_ids, joint.caption_ids)
        return loss

    def _in_blocks(self, joint: JointBatch, scale_loss: Callable[[Tensor], Tensor]) -> Tensor:
        """The loss of this rank's rows against all features; gradients are computed block by block."""
        image, text = joint.features
        terms = Terms(self.objective, self.text_contrast)
        if self.teacher is not None:
            terms = terms._replace(teacher=self.teacher.logits, teacher_weight=TEACHER_WEIGHT)
        total = torch.zeros((), dtype=image.dtype, device=image.device)
        for term in loss_terms(
            terms,
            lambda: Features(image, text, self.model.scale(), self.model.logit_bias),
            *(joint.sample_ids, joint.caption_ids, joint.image_index),
            *(joint.images, joint.texts),
        ):
            scale_loss(term).backward()
            total += term.detach()
        return total
