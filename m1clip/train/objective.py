"""What training makes small: functions of features, which know nothing of ranks, devices or steps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from m1clip.model.clip import Features
from m1clip.train.contrast import fused_infonce

LARGE = 1 << 20  # pairs of a step, from which its products are made in autocast's precision, if that is on


def own_pairs(pictures: int, owners: Tensor) -> Tensor:
    """(n, m) bool: caption j was given to picture i."""
    return torch.arange(pictures, device=owners.device)[:, None] == owners


def same_pairs(pictures: Tensor, captions: Tensor, owners: Tensor) -> Tensor:
    """(n, m) bool: text j also describes image i, because the picture, or one of its captions here, is the same."""
    if owners.device.type == "cpu" and not is_fake(owners):
        return _few_same_pairs(pictures, captions, owners)
    same_picture = pictures[:, None] == pictures[owners]
    # Equal captions get one number below m, without asking how many there are: that would make the host wait.
    order = captions.argsort()
    steps = captions[order].diff(prepend=captions[order[:1]]) != 0
    number = torch.empty_like(order).scatter_(0, order, steps.cumsum(0))
    told = torch.zeros(same_picture.numel(), dtype=torch.bool, device=owners.device)
    told.scatter_(0, owners * len(captions) + number, True)  # picture i has a caption with this number
    return same_picture | told.view(same_picture.shape)[:, number]


def _few_same_pairs(pictures: Tensor, captions: Tensor, owners: Tensor) -> Tensor:
    """The same where looking at values costs nothing: only pictures and captions that are there twice are compared."""
    own = torch.zeros(len(pictures), len(captions), dtype=torch.bool)
    own[owners, torch.arange(len(captions))] = True
    twins = _repeated(pictures)
    own[twins] = pictures[twins, None] == pictures[owners]
    twins = _repeated(captions)
    _, number = captions[twins].unique(return_inverse=True)
    told = torch.zeros(len(pictures), len(twins), dtype=torch.bool)
    told[owners[twins], number] = True  # picture i has a caption with this number
    own[:, twins] |= told[:, number]
    return own


def _repeated(values: Tensor) -> Tensor:
    """Where a value stands that is there more than once."""
    _, number, counts = values.unique(return_inverse=True, return_counts=True)
    return (counts[number] > 1).nonzero().view(-1)


def infonce(features: Features, positive: Tensor, smoothing: float = 0.0) -> Tensor:
    """CLIP's loss; the target is spread evenly over all captions (pictures) that belong to the picture (caption)."""
    # It looks at values, which on a device would make the host wait, and which a fake tensor (train/memory.py) has not.
    if smoothing == 0 and features.image.device.type == "cpu" and not is_fake(features.image):
        half = torch.is_autocast_enabled("cpu") and positive.numel() >= LARGE
        dtype = torch.get_autocast_dtype("cpu") if half else None
        return fused_infonce(features.image, features.text, features.scale, positive, dtype)
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


def distillation(features: Features, teacher: Tensor) -> Tensor:
    """How far what is thought of the pairs is from what a teacher's logits (n, m) say: KL, both ways, in nats."""
    logits = features.scale * features.image @ features.text.T

    def one_way(logits: Tensor, wanted: Tensor) -> Tensor:
        return F.kl_div(
            logits.log_softmax(dim=1), wanted.log_softmax(dim=1), reduction="batchmean", log_target=True
        )

    return (one_way(logits, teacher) + one_way(logits.T, teacher.T)) / 2


OBJECTIVES = {"infonce": infonce, "multi": infonce, "sigmoid": sigmoid}


def positives(objective: str, pictures: Tensor, captions: Tensor, owners: Tensor) -> Tensor:
    """(n, m) bool: what counts as belonging together; plain infonce counts only what was given together."""
    if objective == "infonce":
        return own_pairs(len(pictures), owners)
    return same_pairs(pictures, captions, owners)
