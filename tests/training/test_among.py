"""The loss among captions: against a loop, and in blocks against its definition."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_objective import features

from m1clip import losses as among
from m1clip.losses import at_once
from m1clip.losses import text_contrast as either

text_contrast = functools.partial(either, in_blocks=True)


def test_captions_of_a_image_belong_together() -> None:
    f = features(6)
    images, image_index = torch.tensor([7, 8, 7]), torch.tensor([0, 0, 1, 1, 2, 1])
    captions = torch.tensor([0, 1, 2, 3, 1, 5])  # the second image 7 repeats a caption of the first
    of = images[image_index].tolist()
    logits = (f.scale * f.text @ f.text.T).tolist()
    rows = []
    for i in range(6):
        others = [j for j in range(6) if captions[j] != captions[i]]
        right = [j for j in others if of[j] == of[i]]
        top = math.log(sum(math.exp(logits[i][j]) for j in others))
        rows += [sum(top - logits[i][j] for j in right) / len(right)] if right else []
    found = text_contrast(f, images, captions, image_index)
    assert found.item() == pytest.approx(sum(rows) / len(rows))
    found.backward()
    assert f.text.grad is not None
    assert f.text.grad.isfinite().all()
    assert f.text.grad.abs().sum() > 0


def test_one_caption_each_has_nothing_to_bring_together() -> None:
    f = features(6)
    loss = text_contrast(f, torch.arange(6), torch.tensor([0, 1, 2, 2, 2, 5]), torch.arange(6))
    loss.backward()
    assert loss.item() == 0
    assert f.text.grad is not None
    assert not f.text.grad.any()
    all_equal = text_contrast(f, torch.arange(6), torch.zeros(6, dtype=torch.long), torch.arange(6))
    assert all_equal.item() == 0
    all_equal.backward()
    assert not f.text.grad.any()


@given(st.data())
def test_in_blocks_it_is_the_same_loss_with_the_same_gradient(data: st.DataObject) -> None:
    m = data.draw(st.integers(2, 12))
    numbers = st.lists(st.integers(0, 3), min_size=m, max_size=m).map(torch.tensor)
    images, captions, image_index = data.draw(numbers), data.draw(numbers), data.draw(numbers) % m
    block, scale = data.draw(st.integers(1, m * m)), data.draw(st.sampled_from([1.0, 20.0, 100.0]))
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(among, "AT_ONCE", block)
        for way in (text_contrast, at_once):
            f = features(m, scale=scale)
            loss = way(f, images, captions, image_index)
            (3 * loss).backward()
            assert f.text.grad is not None
            assert f.scale.grad is not None
            found.append((loss.detach(), f.text.grad, f.scale.grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
