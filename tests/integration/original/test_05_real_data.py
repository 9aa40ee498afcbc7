"""5: Flickr8k, Flickr30k and COCO as they are distributed."""

import json
from pathlib import Path

import pytest
from image_sets import image

from m1clip.data.sources import open_source


def write_images(folder: Path, names: list[str]) -> None:
    folder.mkdir(parents=True)
    for number, name in enumerate(names):
        image(number).save(folder / name)


def write_flickr(root: Path, count: int) -> Path:
    """Kaggle's Flickr8k and Flickr30k: captions.txt next to Images/."""
    names = [f"{number}.jpg" for number in range(count)]
    write_images(root / "Images", names)
    rows = [f"{name},caption {line} of {name}" for name in names for line in range(5)]
    (root / "captions.txt").write_text("\n".join(["image,caption", *rows]))
    return root


def write_karpathy(root: Path, count: int) -> Path:
    names = [f"{number}.jpg" for number in range(count)]
    write_images(root / "Flicker8k_Dataset", names)
    sentences = [{"raw": "a dog"}, {"raw": "a brown dog"}]
    splits = ["test" if number == 0 else "train" for number in range(count)]
    images = [
        {"filename": name, "split": split, "sentences": sentences}
        for name, split in zip(names, splits, strict=True)
    ]
    (root / "dataset_flickr8k.json").write_text(json.dumps({"images": images}))
    return root


def write_coco(root: Path, count: int) -> Path:
    for split, number in (("train", count - 1), ("val", 1)):
        names = [f"{split}-{index}.jpg" for index in range(number)]
        write_images(root / f"{split}2017", names)
        images = [{"id": index, "file_name": name} for index, name in enumerate(names)]
        captions = [{"image_id": index, "caption": f"number {index}"} for index in range(number)]
        path = root / "annotations" / f"captions_{split}2017.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"images": images, "annotations": captions}))
    return root


@pytest.mark.parametrize("write", [write_flickr, write_karpathy, write_coco])
@pytest.mark.parametrize("count", [12, 21])
def test_dataset_is_read_as_it_is_distributed(
    write: type[object], count: int, tmp_path: Path
) -> None:
    source = open_source(str(write(tmp_path / "data", count)))  # type: ignore[call-arg]
    samples = [sample for split in source.splits() for sample in source.samples(split)]
    assert len(samples) == count
    assert len(source.samples("train")) < count
    assert all(sample.captions for sample in samples)
    assert samples[0].image.open().size == (52, 40)
