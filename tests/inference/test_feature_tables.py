"""Batches of features: the rows of the file, bit for bit, as float32."""

from __future__ import annotations

import numpy as np
import torch

from m1clip.data.augment import Augmentation
from m1clip.data.cache import FeatureTable
from m1clip.data.captions import CaptionTable
from m1clip.data.loader import BatchPlan, TrainingSet

IMAGES, VIEWS, CAPTIONS = 12, 3, 2


def feature_set() -> TrainingSet:
    draw = np.random.default_rng(0)
    texts = IMAGES * CAPTIONS
    images = FeatureTable(
        draw.standard_normal((IMAGES * VIEWS, 7)).astype(np.float16),
        draw.permutation(IMAGES * VIEWS).reshape(IMAGES, VIEWS),
    )
    captions = CaptionTable(
        tokens=np.zeros((texts, 1), np.int32),
        lengths=np.ones(texts, np.int32),
        keys=np.arange(texts, dtype=np.int64),
        first=np.arange(0, texts + 1, CAPTIONS),
        pad_id=0,
        features=FeatureTable(draw.standard_normal((texts, 5)).astype(np.float16), draw.permutation(texts)),
    )
    plan = BatchPlan(IMAGES, 4, 0)
    return TrainingSet(None, captions, plan, Augmentation(flip=0.5), image_features=images, captions_per_image=CAPTIONS)


def test_a_batch_has_the_rows_of_the_file() -> None:
    data = feature_set()
    images, texts = data.image_features, data.captions.features
    for step in (0, 4):
        batch = data[step]
        assert batch.images is batch.tokens is batch.views is None
        assert batch.image_features.dtype == batch.text_features.dtype == torch.float32
        for image, found in zip(batch.sample_ids.tolist(), batch.image_features.numpy(), strict=True):
            assert any(np.array_equal(found, images.array[row]) for row in images.rows[image])
        expected = texts.array[texts.rows[batch.caption_ids.numpy()]]
        assert np.array_equal(batch.text_features.numpy(), expected.astype(np.float32))
        assert (batch.caption_ids // CAPTIONS == batch.sample_ids[batch.image_index]).all()


def test_a_view_is_the_row_it_was_asked_for() -> None:
    images = feature_set().image_features
    items, views = np.array([3, 0, 7]), np.array([2, 0, 1])
    wanted = np.stack([images.array[images.rows[i, v]] for i, v in zip(items, views, strict=True)])
    assert np.array_equal(images.read(items, views), wanted.astype(np.float32))
    assert np.array_equal(images.read(items), images.read(items, np.zeros(3, np.int64)))
