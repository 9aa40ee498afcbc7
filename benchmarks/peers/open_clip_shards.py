"""Reads shards of `m1clip data pack` with open_clip's own pipeline.

python open_clip_shards.py 'shards/train-{000000..000002}.tar'
"""

from __future__ import annotations

import sys
from functools import partial
from types import SimpleNamespace

import torchvision_ops  # noqa: F401  first: open_clip imports torchvision

# isort: split
import open_clip
import open_clip_train.data as training

# open_clip 3.3.0 does not know the end marks that webdataset 1.x puts between shards: it fails on
# any shards, those of webdataset's own writer too, unless they are turned off.
training.tar_file_expander = partial(training.tar_file_expander, eof_value=None)


def main() -> None:
    """Print how many samples open_clip expects and reads, and the shapes of a batch."""
    options = SimpleNamespace(
        train_data=sys.argv[1], val_data=None, train_num_samples=None, val_num_samples=None, dataset_resampled=False,
        train_data_upsampling_factors=None, seed=0, batch_size=8, workers=1, world_size=1,
    )  # fmt: skip
    tokenizer = open_clip.get_tokenizer("ViT-B-32")
    transform = open_clip.image_transform(64, is_train=False)
    loader = training.get_wds_dataset(
        options, transform, is_train=True, tokenizer=tokenizer
    ).dataloader
    loaded = list(loader)
    images, texts = loaded[0]
    count = sum(len(batch[0]) for batch in loaded)
    print(
        f"expected {loader.num_samples}, read {count}, images {tuple(images.shape)}, texts"
        f" {tuple(texts.shape)}"
    )
    print(f"first caption: {tokenizer.decode(texts[0][texts[0] != 0].tolist())}")


if __name__ == "__main__":
    main()
