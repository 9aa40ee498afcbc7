"""What training makes small: functions of features, which know nothing of ranks, devices or steps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from m1clip.model.clip import Features


def same_pairs(pictures: Tensor, captions: Tensor) -> Tensor:
    """(n, n) bool: text j also describes image i, because the picture or the caption is the same."""
    return (pictures[:, None] == pictures) | (captions[:, None] == captions)


def infonce(features: Features, positive: Tensor, smoothing: float = 0.0) -> Tensor:
    """CLIP's loss: each picture must find the caption in its own place, and the other way round."""
    logits = features.scale * features.image @ features.text.T  # (n, n)
    target = torch.arange(len(logits), device=logits.device)
    forth = F.cross_entropy(logits, target, label_smoothing=smoothing)
    back = F.cross_entropy(logits.T, target, label_smoothing=smoothing)
    return (forth + back) / 2


def multi_positive(features: Features, positive: Tensor, smoothing: float = 0.0) -> Tensor:
    """InfoNCE whose target is spread evenly over all captions (pictures) that belong to the picture (caption)."""
    logits = features.scale * features.image @ features.text.T
    target = positive.to(logits.dtype)

    def one_way(logits: Tensor, target: Tensor) -> Tensor:
        target = target / target.sum(dim=1, keepdim=True)
        return F.cross_entropy(logits, target, label_smoothing=smoothing)

    return (one_way(logits, target) + one_way(logits.T, target.T)) / 2


def sigmoid(features: Features, positive: Tensor, smoothing: float = 0.0) -> Tensor:
    """SigLIP's loss: each of the n x n pairs is asked on its own whether it belongs together."""
    assert features.bias is not None, "the sigmoid loss needs a model with a logit bias"
    logits = features.scale * features.image @ features.text.T + features.bias
    sign = 2.0 * positive.to(logits.dtype) - 1.0
    return -F.logsigmoid(sign * logits).sum() / len(logits)


OBJECTIVES = {"infonce": infonce, "multi": multi_positive, "sigmoid": sigmoid}
