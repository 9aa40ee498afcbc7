"""What training makes small: functions of features, which know nothing of ranks, devices or steps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from m1clip.model.clip import Features


def own_pairs(pictures: int, owners: Tensor) -> Tensor:
    """(n, m) bool: caption j was given to picture i."""
    return torch.arange(pictures, device=owners.device)[:, None] == owners


def same_pairs(pictures: Tensor, captions: Tensor, owners: Tensor) -> Tensor:
    """(n, m) bool: text j also describes image i, because the picture, or one of its captions here, is the same."""
    same_picture = pictures[:, None] == pictures[owners]
    same_caption = (captions[:, None] == captions).float()  # (m, m)
    shared = torch.zeros(same_picture.shape, device=owners.device).index_add_(0, owners, same_caption)
    return same_picture | (shared > 0)


def infonce(features: Features, positive: Tensor, smoothing: float = 0.0) -> Tensor:
    """CLIP's loss; the target is spread evenly over all captions (pictures) that belong to the picture (caption)."""
    logits = features.scale * features.image @ features.text.T  # (n, m)
    target = positive.to(logits.dtype)

    def one_way(logits: Tensor, target: Tensor) -> Tensor:
        target = target / target.sum(dim=1, keepdim=True)
        return F.cross_entropy(logits, target, label_smoothing=smoothing)

    return (one_way(logits, target) + one_way(logits.T, target.T)) / 2


def sigmoid(features: Features, positive: Tensor, smoothing: float = 0.0) -> Tensor:
    """SigLIP's loss: each of the n x m pairs is asked on its own whether it belongs together."""
    assert features.bias is not None, "the sigmoid loss needs a model with a logit bias"
    logits = features.scale * features.image @ features.text.T + features.bias
    sign = 2.0 * positive.to(logits.dtype) - 1.0
    return -F.logsigmoid(sign * logits).sum() / logits.shape[1]


OBJECTIVES = {"infonce": infonce, "multi": infonce, "sigmoid": sigmoid}


def positives(objective: str, pictures: Tensor, captions: Tensor, owners: Tensor) -> Tensor:
    """(n, m) bool: what counts as belonging together; plain infonce counts only what was given together."""
    if objective == "infonce":
        return own_pairs(len(pictures), owners)
    return same_pairs(pictures, captions, owners)
