"""Batches of features: the rows of the file, bit for bit, as float32."""

from __future__ import annotations

import numpy as np
import torch

from m1clip.data.augment import Augmentation
from m1clip.data.loader import BatchPlan
from m1clip.data.store import ArrayPictures
from m1clip.features.tables import FeatureCaptions, FeaturePictures, FeatureSet

PICTURES, VIEWS, CAPTIONS = 12, 3, 2


def feature_set() -> FeatureSet:
    draw = np.random.default_rng(0)
    texts = PICTURES * CAPTIONS
    pictures = FeaturePictures(
        ArrayPictures(np.zeros((PICTURES, 1, 1, 3), np.uint8)),
        draw.standard_normal((PICTURES * VIEWS, 7)).astype(np.float16),
        draw.permutation(PICTURES * VIEWS).reshape(PICTURES, VIEWS),
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
    return FeatureSet(pictures, captions, BatchPlan(PICTURES, 4, 0), augmentation, False, None, CAPTIONS)


def test_a_batch_has_the_rows_of_the_file() -> None:
    data = feature_set()
    pictures, captions = data.pictures, data.captions
    assert isinstance(pictures, FeaturePictures)
    assert isinstance(captions, FeatureCaptions)
    for step in (0, 4):
        batch = data[step]
        assert batch.pixels.dtype == batch.tokens.dtype == torch.float32
        for picture, seen in zip(batch.pictures.tolist(), batch.pixels.numpy(), strict=True):
            assert any(np.array_equal(seen, pictures.table[row]) for row in pictures.at[picture])
        told = captions.table[captions.at[batch.captions.numpy()]]
        assert np.array_equal(batch.tokens.numpy(), told.astype(np.float32))
        assert (batch.captions // CAPTIONS == batch.pictures[batch.owners]).all()


def test_a_view_is_the_row_it_was_asked_for() -> None:
    pictures = feature_set().pictures
    assert isinstance(pictures, FeaturePictures)
    where, views = np.array([3, 0, 7]), np.array([2, 0, 1])
    wanted = np.stack([pictures.table[pictures.at[i, v]] for i, v in zip(where, views, strict=True)])
    assert np.array_equal(pictures.features(where, views), wanted.astype(np.float32))
    assert np.array_equal(pictures.features(where), pictures.features(where, np.zeros(3, np.int64)))


def test_features_are_not_varied_like_pixels() -> None:
    views = feature_set()[0].views
    assert (views.boxes == [0, 0, 1, 1]).all()
    assert not views.flips.any()
    assert (views.gains == 1).all()
