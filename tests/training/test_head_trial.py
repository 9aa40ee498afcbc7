"""New heads that start from those of the model in the box, and which trial decides."""

import dataclasses

import numpy as np
import pytest
import torch
from safetensors.torch import load as tensors_from_bytes

from m1clip.inference.features import SplitFeatures
from m1clip.model.heads import Head
from m1clip.model.named import GENERAL, HEADS, boxed_files
from m1clip.model.presets import CLIPConfig, HeadConfig, PretrainedImageConfig, PretrainedTextConfig
from m1clip.model.residual import ResidualKind
from m1clip.training.duration import TimeBudget
from m1clip.training.head_trial import (
    CAREFUL,
    MAX_HELD_OUT,
    NEW_HEAD_LRS,
    TRIAL_FRACTION,
    HeadCandidate,
    Scores,
    choose_heads,
    fits_general,
    general_heads,
    head_candidates,
    held_out_images,
    log_ranks,
    split_rows,
    trial_limit,
)

BOTH_LITE = "efficientnet-lite0+lite2"
SHAPE = CLIPConfig(
    image_tower=PretrainedImageConfig(kind=BOTH_LITE, name=BOTH_LITE, image_size=260),
    text_tower=PretrainedTextConfig(context_length=64),
    image_head=HeadConfig(kind="adapter", hidden=512, dropout=0.5),
    text_head=HeadConfig(kind="adapter", hidden=512, dropout=0.5),
    embed_dim=256,
)


def test_general_heads_compute_the_same_with_a_wider_hidden_layer() -> None:
    saved = tensors_from_bytes(boxed_files(GENERAL)[HEADS])
    wide = general_heads(SHAPE)
    torch.manual_seed(0)
    for side in ("image_head", "text_head"):
        made = []
        for weights in (saved, wide):
            own = {
                name.removeprefix(f"{side}."): tensor.float()
                for name, tensor in weights.items()
                if name.startswith(side)
            }
            hidden, width = own["up.weight"].shape
            head = Head(HeadConfig(kind="adapter", hidden=hidden), width, 256)
            head.load_state_dict(own)
            features = torch.randn(3, width, generator=torch.Generator().manual_seed(1))
            made.append(head.eval()(features))
        torch.testing.assert_close(made[0], made[1], atol=1e-4, rtol=1e-4)


def test_general_heads_fit_only_their_towers() -> None:
    assert fits_general(SHAPE)
    assert not fits_general(dataclasses.replace(SHAPE, embed_dim=128))
    narrow = HeadConfig(kind="adapter", hidden=8)
    assert not fits_general(dataclasses.replace(SHAPE, image_head=narrow))
    lite0 = PretrainedImageConfig(image_size=260)
    assert not fits_general(dataclasses.replace(SHAPE, image_tower=lite0))


@pytest.mark.parametrize(("images", "held_out"), [(40, 8), (1_000, 200), (3_999, MAX_HELD_OUT)])
def test_trial_trains_on_all_images_but_the_held_out_ones(images: int, held_out: int) -> None:
    rows, others = split_rows(images, seed=1)
    assert (
        (len(rows), len(others))
        == (images - held_out, held_out)
        == (images - held_out_images(images), held_out_images(images))
    )
    assert set(rows) | set(others) == set(range(images))


@pytest.mark.parametrize(
    ("adapters", "gain", "is_trained"),
    [
        ((), 0.5, True),  # many times the standard error
        ((), 0.01, False),  # within it: the closed form stays
        ((), -0.5, False),
        (("embeddings",), 0.01, True),  # a trained model is adapted if that gains anything
        (("embeddings",), -0.01, False),
    ],
)
def test_new_heads_are_trained_only_for_a_clear_gain(
    adapters: tuple[ResidualKind, ...], gain: float, is_trained: bool
) -> None:
    noise = np.random.default_rng(0).normal(size=100)

    def trial(candidate: HeadCandidate) -> Scores:
        before = np.full(100, 2.0)
        yield before
        yield before - gain - 0.3 * (noise - noise.mean())

    candidates = head_candidates(adapters, () if adapters else ("cca",))
    chosen = choose_heads(candidates, 500, trial)
    careful = CAREFUL * min(candidate.lr for candidate in candidates)
    assert chosen.chosen.lr == (candidates[0].lr if is_trained else careful)
    assert ("clearly" in chosen.reason) == (gain == 0.01 and not is_trained)
    assert tuple(candidate.lr for candidate in head_candidates((), ("cca",))) == NEW_HEAD_LRS


@pytest.mark.parametrize(
    ("factor", "spread", "are_trained"),
    [(2.0, 0.1, 2), (1.2, 0.1, 4), (2.0, 6.0, 4)],
    ids=["clearly worse", "a little worse", "worse by chance"],
)
def test_start_that_is_clearly_worse_is_not_trained(
    factor: float, spread: float, are_trained: int
) -> None:
    noise = np.random.default_rng(0).normal(size=100)
    noise -= noise.mean()
    built, trained = [], []

    def trial(candidate: HeadCandidate) -> Scores:
        built.append(candidate)
        worse = np.log(factor) + spread * noise if candidate.start == "cca" else np.zeros(100)
        yield 2.0 + worse
        trained.append(candidate)
        yield 1.9 + worse - candidate.lr

    candidates = head_candidates((), ("cca", "general"))
    result = choose_heads(candidates, 500, trial)
    assert len(trained) == are_trained
    assert len(built) == (3 if are_trained == 2 else 4), "the worse start is built once"
    assert result.chosen == HeadCandidate(max(NEW_HEAD_LRS), None, "general")
    assert len(result.ranks) == 4


@pytest.mark.parametrize("trials", [0, 1, 3])
def test_trials_that_the_time_does_not_suffice_for_are_not_chosen(trials: int) -> None:
    ended = []

    def trial(candidate: HeadCandidate) -> Scores:
        yield np.full(100, 2.0)
        if len(ended) >= trials:
            return  # as run_trial does between two steps
        ended.append(candidate)
        yield np.full(100, 1.9 - len(ended) / 10)

    candidates = head_candidates((), ("cca", "general"))
    result = choose_heads(candidates, 500, trial, lambda: len(ended) == trials)
    assert len(ended) == trials
    if trials:
        assert result.chosen == ended[-1], "the best of those that ended"
    else:
        assert result.chosen.lr == CAREFUL * min(NEW_HEAD_LRS)
    assert f"no time for {4 - trials} of 4 trials" in result.reason


def test_trials_end_with_their_part_of_the_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [100.0]
    monkeypatch.setattr("m1clip.training.duration.time.perf_counter", lambda: seconds[0])
    is_late = trial_limit(TimeBudget(600.0, used=100.0))  # used by imports and loading
    seconds[0] += TRIAL_FRACTION * 500 - 1
    assert not is_late()
    seconds[0] += 2
    assert is_late()


def test_log_ranks_are_the_mean_of_both_directions() -> None:
    image = np.eye(3, dtype=np.float32)
    text = np.stack([*image, np.array([0.6, 0.5, 0.1], dtype=np.float32)])
    features = SplitFeatures(image, text, np.array([0, 1, 2, 2]), np.arange(4), None)
    # The last caption finds its image in the third place.
    np.testing.assert_allclose(log_ranks(features), [0, 0, np.log(3) / 2 / 2])
