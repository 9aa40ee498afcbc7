"""Several models side by side: vectors, losses, a run, and what does not support them."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_run import finished_run, prepared, small_config
from torch.testing import assert_close

import m1clip
from m1clip import console
from m1clip.errors import UserError
from m1clip.export.layouts import export
from m1clip.losses.registry import LOSSES, Ids
from m1clip.losses.run_loss import RunLoss
from m1clip.model.clip import CLIP, Features, build_clip
from m1clip.model.members import vectors_by_member
from m1clip.model.presets import CLIPConfig, flops_per_pair, preset, with_fields
from m1clip.optimizers import is_hidden_matrix
from m1clip.training.parity import check_causality
from m1clip.training.spec import DecidedSettings, RunSpec
from m1clip.training.workbench import Workbench

ONE = with_fields(
    preset("tiny"),
    **{"image_size": 32, "vocab_size": 40, "vision_width": 64, "vision_heads": 1},
    **{"vision_layers": 1, "text_width": 64, "text_heads": 1, "text_layers": 1, "embed_dim": 16},
)
TWO = replace(ONE, members=2, embed_dim=32)


def batch() -> tuple[torch.Tensor, torch.Tensor, Ids]:
    torch.manual_seed(1)
    tokens = torch.randint(1, 38, (5, 9))
    tokens[:, -1] = 39
    rows = torch.arange(5)
    return torch.randn(5, 3, 32, 32), tokens, Ids(rows, rows, rows)


def member(model: CLIP, number: int) -> CLIP:
    """One of two members as a model of its own."""
    alone = build_clip(ONE)
    pairs = (
        (alone.image_tower, model.image_tower.parts[number]),
        (alone.text_tower, model.text_tower.parts[number]),
        (alone.image_head, model.image_head.heads[number]),
        (alone.text_head, model.text_head.heads[number]),
    )
    for own, of_model in pairs:
        own.load_state_dict(of_model.state_dict())
    return alone.eval()


def test_vectors_are_those_of_each_member_side_by_side() -> None:
    model = build_clip(TWO).eval()
    pixels, tokens, _ = batch()
    features = model(pixels, tokens)
    assert_close(features.image.norm(dim=1), torch.ones(5))
    parts = [vectors_by_member(side, 2) for side in (features.image, features.text)]
    for number in (0, 1):
        alone = member(model, number)(pixels, tokens)
        assert_close(parts[0][number], alone.image, atol=1e-5, rtol=1e-5)
        assert_close(parts[1][number], alone.text, atol=1e-5, rtol=1e-5)
    assert float((parts[0][0] - parts[0][1]).detach().abs().max()) > 0.1, (
        "members start differently"
    )


@pytest.mark.parametrize("name", LOSSES)
def test_loss_is_the_mean_of_the_members_and_so_is_its_gradient(name: str) -> None:
    shape = replace(TWO, logit_bias=LOSSES[name].needs_bias)
    model = build_clip(shape)
    pixels, tokens, ids = batch()
    features = model(pixels, tokens)
    loss, gradients = RunLoss(LOSSES[name], 0.3, members=2).loss_and_grads(features, ids)
    torch.autograd.backward([features.image, features.text], gradients)
    found = {key: p.grad for key, p in model.named_parameters()}
    model.zero_grad()
    features = model(pixels, tokens)
    alone = RunLoss(LOSSES[name], 0.3)
    by_member = zip(
        vectors_by_member(features.image, 2), vectors_by_member(features.text, 2), strict=True
    )
    losses = [
        alone.value(Features(image, text, features.scale, features.bias), ids)
        for image, text in by_member
    ]
    mean = torch.stack(losses).mean()
    mean.backward()
    assert_close(loss, mean.detach())
    for key, p in model.named_parameters():
        assert_close(found[key], p.grad, atol=1e-6, rtol=1e-4)


def test_members_have_the_same_optimizers_and_twice_the_work() -> None:
    def hidden(shape: CLIPConfig) -> int:
        named = build_clip(shape).named_parameters()
        return sum(p.numel() for name, p in named if is_hidden_matrix(name, p))

    assert hidden(TWO) == 2 * hidden(ONE)
    assert flops_per_pair(TWO, 9) == pytest.approx(2 * flops_per_pair(ONE, 9))


def test_run_with_members_trains_saves_and_loads() -> None:
    run = finished_run({"model.members": 2, "data.cutmix": 0.5, "data.word_dropout": 0.1})
    model = m1clip.load(run)
    assert (model.clip.config.members, model.embed_dim) == (2, 32)
    first, second = (tower.patch.convs[1].weight for tower in model.clip.image_tower.parts)
    assert not torch.equal(first, second)


def test_small_run_has_stem_filters_in_each_member() -> None:
    changes = {"model.members": 2}
    model = prepared(small_config(changes)).build_model()
    first = [tower.patch.convs[0].weight for tower in model.image_tower.parts]
    assert torch.equal(first[0][:2], first[1][:2])


def test_causality_of_members_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_clip(TWO)
    check_causality(model, "cpu", nullcontext)
    monkeypatch.setattr(type(model.text_tower.parts[0]), "forward", lambda tower, tokens: tokens)
    with pytest.raises(UserError, match="attention sees later tokens"):
        check_causality(model, "cpu", nullcontext)


def test_impossible_members_are_user_errors() -> None:
    with pytest.raises(UserError, match="an embed_dim of 32 cannot be split among 3 members"):
        replace(TWO, members=3)
    with pytest.raises(UserError, match="2 members need towers and heads of our own"):
        CLIPConfig(members=2, image_head=replace(ONE.image_head, kind="identity"))
    with pytest.raises(UserError, match="members must be at most 16"):
        replace(TWO, members=17, embed_dim=34)


def test_other_formats_reject_members(tmp_path: Path) -> None:
    run = finished_run({"model.members": 2, "data.cutmix": 0.5, "data.word_dropout": 0.1})
    with pytest.raises(UserError, match="2 members"):
        export(run, "openclip", tmp_path / "out")


def test_members_that_are_decided_after_a_measurement_replace_the_measured_model() -> None:
    workbench = Workbench()
    with console.quiet():
        spec = workbench.resolve(DecidedSettings(complete=small_config()))
        measured = workbench.inputs(spec)
        more = spec.config.with_values(members=2, embed_dim=64)
        inputs = workbench.inputs(RunSpec(more))
    assert measured.model.init.config.members == 1
    assert (inputs.model.init.config.members, inputs.model.init.config.embed_dim) == (2, 64)
    assert len(inputs.build_model().text_tower.parts) == 2
