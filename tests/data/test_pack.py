"""Shards: the same batches as the folder, readable by webdataset, the same bytes each time."""

import errno
import io
import json
import os
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
from image_sets import break_files, image, make_set, plan
from PIL import Image
from small_run import SERVER

from m1clip.config import DataConfig
from m1clip.data import pack as pack_module
from m1clip.data.augment import Augmentation
from m1clip.data.images import ImageRef, Preprocess
from m1clip.data.loader import Batch, BatchPlan, TrainingSet, batches
from m1clip.data.pack import pack
from m1clip.data.prepare import load_split
from m1clip.data.sources import Options, open_source
from m1clip.errors import UserError
from m1clip.text.bpe import BpeTokenizer


def members(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as tar:
        return {entry.name: tar.extractfile(entry).read() for entry in tar}  # type: ignore[union-attr]


def training(path: Path, cache: str) -> tuple[list[Batch], list[str]]:
    source = open_source(str(path))
    config = DataConfig(source=(str(path),), cache=cache)  # type: ignore[arg-type]
    split = load_split(
        source, "train", config, BpeTokenizer(), 32, Preprocess(image_size=24), 1.15, plan()
    )
    data = TrainingSet(
        split.images,
        split.captions,
        BatchPlan(len(split.samples), 8, 5),
        Augmentation(0.6, 0.5, 0.2),
    )
    return list(batches(data, 0, 9, 0, "fork", False)), [sample.id for sample in split.samples]


@pytest.mark.parametrize("cache", ["disk", "off"])
def test_shards_give_same_batches_as_folder(tmp_path: Path, cache: str) -> None:
    folder = make_set(tmp_path / "set")
    pack(open_source(str(folder)), tmp_path / "shards", shard_size=12)
    (ours, ids), (packed, packed_ids) = (
        training(folder, cache),
        training(tmp_path / "shards", cache),
    )
    assert ids == packed_ids
    for one, other in zip(ours, packed, strict=True):
        for name in ("images", "tokens", "sample_ids", "caption_ids", "views"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), name)


def test_pack_round_trip_of_splits_captions_and_ids(tmp_path: Path) -> None:
    folder = make_set(tmp_path / "set", train=25)
    for name in ("shards", "again"):
        written = pack(open_source(str(folder)), tmp_path / name, shard_size=10)
        assert str(written).endswith("41 images (train 25, val 8, test 8) in 5 shards")
    trains = [f"train-{n:06d}.tar" for n in range(3)]
    names = sorted(path.name for path in (tmp_path / "shards").iterdir())
    tars = ["test-000000.tar", *trains, "val-000000.tar"]
    assert names == ["sizes.json", *(f"{tar}{end}" for tar in tars for end in ("", ".index"))]
    assert all(
        (tmp_path / "shards" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
        for name in names
    )
    sizes = json.loads((tmp_path / "shards" / "sizes.json").read_text())
    assert [sizes[name] for name in trains] == [10, 10, 5]
    before, after = open_source(str(folder)), open_source(str(tmp_path / "shards"))
    for split in ("train", "val", "test"):
        read = [
            [(sample.id, sample.captions) for sample in source.samples(split)]
            for source in (before, after)
        ]
        assert read[0] == read[1]
    assert after.problems == []
    inside = members(tmp_path / "shards" / "train-000000.tar")
    assert inside["000000003.jpg"] == (folder / "images" / "train-0003.jpg").read_bytes()
    assert inside["000000003.txt"] == b"image number 3 of train"


def test_processes_write_the_bytes_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_set(tmp_path / "set")
    break_files(folder, [3, 11])
    one = pack(open_source(str(folder)), tmp_path / "threads", shard_size=7, threads=2)
    monkeypatch.setattr(pack_module, "decode_processes", lambda images, cpus: 2)
    monkeypatch.setattr(pack_module, "image_bytes", None)  # not read in this process
    leftover = tmp_path / "processes"
    other = pack(open_source(str(folder)), leftover, shard_size=7, threads=2)
    assert other._replace(folder=one.folder) == one
    files = {path.name: path.read_bytes() for path in one.folder.iterdir()}
    assert {path.name: path.read_bytes() for path in other.folder.iterdir()} == files


def test_rare_formats_become_png_and_large_images_are_downscaled(tmp_path: Path) -> None:
    folder = make_set(tmp_path / "set", train=3)
    image(1).save(folder / "images" / "train-0000.jpg", "BMP")
    image(2).save(folder / "images" / "train-0001.jpg", "WEBP", lossless=True)
    image(5, (31, 20)).save(folder / "images" / "train-0002.jpg")
    for name, size in (("shards", None), ("small", 24)):
        pack(open_source(str(folder)), tmp_path / name, image_size=size)
    inside, small = (members(tmp_path / name / "train-000000.tar") for name in ("shards", "small"))
    assert {"000000000.png", "000000001.webp", "000000002.jpg"} < set(inside)
    np.testing.assert_array_equal(Image.open(io.BytesIO(inside["000000000.png"])), image(1))
    assert Image.open(io.BytesIO(small["000000000.jpg"])).size == (31, 24)
    assert small["000000002.jpg"] == inside["000000002.jpg"]


def test_broken_images_are_skipped_and_named(tmp_path: Path) -> None:
    folder = make_set(tmp_path / "set")
    break_files(folder, [0, 5])
    source = open_source(str(folder))
    written = pack(source, tmp_path / "shards")
    assert (written.images["train"], len(written.skipped)) == (38, 2)
    assert "train-0005.jpg: not an image" in written.skipped[1]
    with pytest.raises(UserError, match="not an empty folder"):
        pack(source, tmp_path)
    for file in (folder / "images").iterdir():
        file.write_bytes(b"")
    with pytest.raises(UserError, match=r"none of the 56 images .*empty"):
        pack(source, tmp_path / "none")


def test_full_disk_names_the_shard_and_leaves_no_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = open_source(str(make_set(tmp_path / "set"))), tmp_path / "shards"

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(pack_module, "_add_sample", full)
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)) as error:
            pack(source, out, threads=1)
    assert error.value.filename == str(out / "train-000000.tar")
    assert not list(out.glob("*.partial"))
    assert pack(source, out).images["train"] == 40


def _pack_and_hang(folder: Path, out: Path) -> None:
    """Pack with two threads that hang at the images 17 and 28."""
    honest = pack_module.image_bytes

    def hang(ref: ImageRef, size: int | None) -> tuple[str, bytes]:
        while str(ref).endswith(("train-0017.jpg", "train-0028.jpg")):
            time.sleep(0.01)
        return honest(ref, size)

    pack_module.image_bytes = hang
    pack(open_source(str(folder)), out, shard_size=5, threads=2)


def test_killed_pack_continues_and_gives_the_same_bytes(tmp_path: Path) -> None:
    folder, out = make_set(tmp_path / "set"), tmp_path / "shards"
    break_files(folder, [3])
    pack(open_source(str(folder)), tmp_path / "undisturbed", shard_size=5, threads=3)
    process = SERVER.Process(target=_pack_and_hang, args=(folder, out))
    process.start()
    while not (out / "train-000004.tar").exists():
        assert process.is_alive()
        time.sleep(0.01)
    process.kill()
    process.join()
    before = (out / "train-000001.tar").stat()
    with pytest.raises(UserError, match="not an empty folder"):
        pack(open_source(str(folder)), out, shard_size=6)
    packed = pack(open_source(str(folder)), out, shard_size=5)
    assert (packed.images["train"], packed.skipped) == (39, [f"{out}/train-000000.tar: 1 image"])
    assert (out / "train-000001.tar").stat() == before, "not written again"
    names = sorted(path.name for path in out.iterdir())
    assert names == sorted(path.name for path in (tmp_path / "undisturbed").iterdir())
    assert all(
        (out / name).read_bytes() == (tmp_path / "undisturbed" / name).read_bytes()
        for name in names
    )
    assert open_source(str(out), options=Options(stream=True)).caption_count() == 2 * 55


def test_webdataset_reads_packed_shards(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    folder = make_set(tmp_path / "set", train=12)
    pack(open_source(str(folder)), tmp_path / "shards", shard_size=5)
    urls = str(tmp_path / "shards" / "train-{000000..000002}.tar")
    pipeline = webdataset.WebDataset(urls, shardshuffle=False).decode("pilrgb")
    samples = list(
        pipeline.rename(image="jpg;png;jpeg;webp", text="txt").to_tuple("image", "text", "json")
    )
    assert len(samples) == 12
    image, text, about = samples[7]
    assert text == "image number 7 of train"
    assert about["id"] == "images/train-0007.jpg"
    np.testing.assert_array_equal(image, Image.open(folder / about["id"]))
