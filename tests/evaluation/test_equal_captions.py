"""Equal captions are equally right: in ranks, recall, chance, in-batch accuracy, confusions and top-1 accuracy."""

from __future__ import annotations

import pytest
import torch

from m1clip.data.captions import caption_keys
from m1clip.evaluation.analysis import confusions, difficulty_by_similarity
from m1clip.evaluation.retrieval import held_out, ranks, retrieval

LABELS = torch.arange(24) % 3  # 24 images of three classes, one caption each
OWNER = torch.arange(24)
CLASSES = torch.eye(3)[LABELS]


def test_the_captions_of_a_class_are_one_caption() -> None:
    scores = held_out(CLASSES, CLASSES, OWNER, LABELS, LABELS)
    for metric in scores.metrics:
        assert metric.value == 1, metric.name
    assert scores["top1_accuracy"].chance == pytest.approx(1 / 3)
    assert scores["image_to_text/recall@1"].chance == pytest.approx(1 / 3)
    assert scores["text_to_image/recall@1"].chance == pytest.approx(8 / 24)
    assert 1 / 12 < scores["in_batch_12/accuracy"].chance < 1
    assert retrieval(CLASSES, CLASSES, OWNER)["image_to_text/recall@1"].value == 0, "without keys they all tie"


def test_top1_accuracy_is_image_to_text_recall_at_1_of_one_template() -> None:
    generator = torch.Generator().manual_seed(0)
    image = torch.nn.functional.normalize(CLASSES + 0.6 * torch.randn(24, 3, generator=generator), dim=1)
    scores = held_out(image, CLASSES, OWNER, LABELS, LABELS)
    assert 0.3 < scores["top1_accuracy"].value < 1
    assert scores["top1_accuracy"].value == scores["image_to_text/recall@1"].value


def test_a_class_is_the_mean_of_its_templates() -> None:
    image = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    text = torch.tensor([[0.9, 0.1], [0.8, 0.6], [0.1, 0.9], [0.95, 0.05]])  # the last template of class 1 misleads
    scores = held_out(image, text, torch.tensor([0, 0, 1, 1]), torch.arange(4), torch.tensor([0, 1]))
    assert scores["top1_accuracy"].value == 1
    assert held_out(image * torch.nan, text, torch.tensor([0, 0, 1, 1]), None, torch.tensor([0, 1]))[
        "top1_accuracy"
    ].value == 0  # fmt: skip


def test_a_wrong_caption_counts_once_however_often_it_is_there() -> None:
    image = torch.tensor([[0.6, 0.8], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0]])
    text = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0]])
    keys = torch.from_numpy(caption_keys(["a cat", "a dog", " A Dog", "a dog"]))
    assert ranks(image, text, torch.arange(4), keys).image_to_text.tolist() == [2, 1, 1, 1]


def test_another_image_of_the_same_caption_is_no_confusion() -> None:
    image, text = (torch.tensor([[0.9, 0.1], [1.0, 0.0], [0.0, 1.0]]), torch.tensor([[1.0, 0], [1.0, 0], [0, 1.0]]))
    keys, owner = torch.tensor([0, 0, 1]), torch.arange(3)
    assert [each.caption for each in confusions(image, text, owner, most=5)] == [0]
    assert confusions(image, text, owner, keys, most=5) == []
    assert sum(share.n for share in difficulty_by_similarity(image, text, owner, keys).values()) == 4
