"""Batches of features: the rows of the file, bit for bit, as float32."""

from __future__ import annotations

import numpy as np
import torch

from m1clip.data.augment import Augmentation
from m1clip.data.cache import ArrayImages
from m1clip.data.features import FeatureCaptions, FeatureImages, FeatureSet
from m1clip.data.loader import BatchPlan

IMAGES, VIEWS, CAPTIONS = 12, 3, 2


def feature_set() -> FeatureSet:
    draw = np.random.default_rng(0)
    texts = IMAGES * CAPTIONS
    images = FeatureImages(
        ArrayImages(np.zeros((IMAGES, 1, 1, 3), np.uint8)),
        draw.standard_normal((IMAGES * VIEWS, 7)).astype(np.float16),
        draw.permutation(IMAGES * VIEWS).reshape(IMAGES, VIEWS),
    )
    captions = FeatureCaptions(
        tokens=np.zeros((texts, 1), np.int32),
        lengths=np.ones(texts, np.int32),
        keys=np.arange(texts, dtype=np.int64),
        first=np.arange(0, texts + 1, CAPTIONS),
        pad_id=0,
        table=draw.standard_normal((texts, 5)).astype(np.float16),
        at=draw.permutation(texts),
    )
    augmentation = Augmentation(crop_min=0.5, flip=0.5, colour=0.4)
    return FeatureSet(images, captions, BatchPlan(IMAGES, 4, 0), augmentation, False, None, CAPTIONS)


def test_a_batch_has_the_rows_of_the_file() -> None:
    data = feature_set()
    images, captions = data.images, data.captions
    assert isinstance(images, FeatureImages)
    assert isinstance(captions, FeatureCaptions)
    for step in (0, 4):
        batch = data[step]
        assert batch.pixels.dtype == batch.tokens.dtype == torch.float32
        for image, seen in zip(batch.images.tolist(), batch.pixels.numpy(), strict=True):
            assert any(np.array_equal(seen, images.table[row]) for row in images.at[image])
        told = captions.table[captions.at[batch.captions.numpy()]]
        assert np.array_equal(batch.tokens.numpy(), told.astype(np.float32))
        assert (batch.captions // CAPTIONS == batch.images[batch.image_index]).all()


def test_a_view_is_the_row_it_was_asked_for() -> None:
    images = feature_set().images
    assert isinstance(images, FeatureImages)
    where, views = np.array([3, 0, 7]), np.array([2, 0, 1])
    wanted = np.stack([images.table[images.at[i, v]] for i, v in zip(where, views, strict=True)])
    assert np.array_equal(images.features(where, views), wanted.astype(np.float32))
    assert np.array_equal(images.features(where), images.features(where, np.zeros(3, np.int64)))


def test_features_are_not_varied_like_pixels() -> None:
    views = feature_set()[0].views
    assert (views.boxes == [0, 0, 1, 1]).all()
    assert not views.flips.any()
    assert (views.gains == 1).all()
