"""Heads: standardization, projection and dropout."""

import pytest
import torch

from m1clip.model.heads import Head, dropout_mask, hash64
from m1clip.model.presets import HeadConfig


def test_adapter_head_starts_as_projection_of_standardized_features() -> None:
    torch.manual_seed(0)
    head = Head(HeadConfig(kind="adapter", hidden=8, dropout=0.5), 6, 4)
    head.initialize()
    features = torch.randn(50, 6) * 100 + 7
    head.standardize(features.mean(dim=0), features.std(dim=0))
    made = head.eval()(features)
    torch.testing.assert_close(made, head.project((features - head.mean) / head.deviation))
    assert 0.2 < float(made.detach().std()) < 3  # the scale of the features is gone
    dropped = head(features, torch.arange(50))
    assert torch.equal(dropped[7:9], head(features[7:9], torch.arange(7, 9))), (
        "the other rows make no difference"
    )
    assert not torch.equal(dropped, made)
    assert not torch.equal(dropped, head(features, torch.arange(1, 51)))


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_dropout_masks_are_the_same_on_every_device(device: str) -> None:
    if not getattr(torch, device).is_available():
        pytest.skip(f"needs {device}")
    keys = torch.randint(-(2**63), 2**63 - 1, (40,))
    assert torch.equal(dropout_mask(keys.to(device), 100, 0.3).cpu(), dropout_mask(keys, 100, 0.3))


def test_head_dropout_fraction_and_mean() -> None:
    head = Head(HeadConfig(kind="adapter", hidden=1, dropout=0.75), 301, 4)
    thin = head._dropped(torch.ones(401, 301), 0.25, hash64(torch.arange(401)))
    assert float((thin == 0).float().mean()) == pytest.approx(0.25, abs=0.01)
    assert float(thin.mean()) == pytest.approx(1.0, abs=0.01)
    assert sorted(thin.unique().tolist()) == [0.0, pytest.approx(4 / 3)]
    columns = (thin == 0).float().mean(dim=0)
    assert float(columns.min()) > 0.15  # every position is dropped sometimes, none always
    assert float(columns.max()) < 0.35
    rows = (thin == 0).float() - 0.25
    together = (rows @ rows.T).fill_diagonal_(0) / (0.25 * 0.75 * 301**0.5)
    assert float(together.std()) == pytest.approx(1, abs=0.05), (
        "masks of neighbours are independent"
    )
    assert torch.equal(head._dropped(torch.ones(3), 0.25, None), torch.ones(3))
