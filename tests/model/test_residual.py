"""Residual adapters on heads: they begin as the identity, and are merged."""

import pytest
import torch
from tiny_model import tiny_clip
from torch import nn

from m1clip.model.heads import Head
from m1clip.model.lora import merged_state
from m1clip.model.presets import HeadConfig
from m1clip.model.residual import ResidualKind, add_residual, residual_kinds


def make_head(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "projection":
        return tiny_clip().image_head
    head = Head(HeadConfig(kind="adapter", hidden=8), 32, 16)
    head.initialize()
    return head.eval()


@pytest.mark.parametrize(
    ("kind", "adapter"),
    [("projection", "embeddings"), ("projection", "features"), ("adapter", "features")],
)
def test_adapter_begins_as_the_identity_and_is_merged(kind: str, adapter: ResidualKind) -> None:
    features = torch.randn(5, 32)
    plain, head = make_head(kind), make_head(kind)
    assert adapter in residual_kinds(head)
    add_residual(head, adapter)
    assert torch.equal(head(features), plain(features))
    matrices = [p for p in head.parameters() if p.requires_grad and p.ndim == 2]
    assert matrices
    assert all(not p.any() for p in matrices), "weight decay pulls to the initial model"
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    head(features).pow(2).sum().backward()
    optimizer.step()
    trained = head(features)
    assert not torch.allclose(trained, plain(features))
    plain.load_state_dict(merged_state(head))
    torch.testing.assert_close(plain(features), trained)


def test_new_projection_of_a_frozen_tower_has_only_feature_adapters() -> None:
    assert residual_kinds(make_head("adapter")) == ("features",)
