"""webdataset shards are read in place, never unpacked."""

import io
import json
import pickle
import tarfile
from pathlib import Path

import pytest
from source_helpers import add_member, everything, image_bytes, shard_samples, write_tar

from m1clip.data.images import BadImage
from m1clip.data.sources import open_source
from m1clip.data.sources.shards import members
from m1clip.errors import UserError


def test_pattern_folder_and_file(tmp_path: Path) -> None:
    for shard in range(3):
        write_tar(tmp_path / f"shard-{shard:03d}.tar", shard_samples(4))
    (tmp_path / "shard-000.parquet").write_bytes(b"what img2dataset leaves next to each shard")
    for spec, count in (
        ("shard-{000..001}.tar", 8),
        ("shard-0*{1..2}.tar", 8),
        ("shard-000.tar", 4),
        ("", 12),
    ):
        assert len(everything(open_source(str(tmp_path / spec)))) == count
    sample = everything(open_source(str(tmp_path)))["shard-002.tar/00003.jpg"]
    assert sample.captions == ("caption 3",)
    assert abs(sample.image.open().getpixel((3, 3))[0] - 60) < 6  # type: ignore[index]
    assert pickle.loads(pickle.dumps(sample)) == sample


def test_split_from_folder_name_and_json(tmp_path: Path) -> None:
    write_tar(tmp_path / "train/0.tar", shard_samples(2))
    write_tar(tmp_path / "val-000.tar", shard_samples(1))
    about = json.dumps({"captions": ["x", "y"], "split": "test"}).encode()
    write_tar(
        tmp_path / "more.tar",
        [("k.png", image_bytes(kind="PNG")), ("k.txt", b"x"), ("k.json", about)],
    )
    source = open_source(str(tmp_path))
    assert [len(source.samples(split)) for split in source.splits()] == [2, 1, 1]
    assert source.samples("test")[0].captions == ("x", "y")


def test_captions_of_shards_are_decoded_as_those_of_text_files(tmp_path: Path) -> None:
    texts = {"a": "Café".encode("cp1252"), "b": "Café".encode("utf-16"), "c": image_bytes()}
    members = [
        (f"{k}.{s}", v) for k, t in texts.items() for s, v in (("jpg", image_bytes()), ("txt", t))
    ]
    source = open_source(str(write_tar(tmp_path / "s.tar", members)))
    assert [sample.captions for sample in everything(source).values()] == [("Café",)] * 2
    assert [problem.message for problem in source.problems] == ["no caption"]


def test_json_caption_and_incomplete_samples(tmp_path: Path) -> None:
    entries = [("a.webp", image_bytes(kind="WEBP")), ("a.json", b'{"caption": "from json"}')]
    entries += [
        ("b.jpg", image_bytes()),
        ("c.txt", b"alone"),
        ("d.jpg", image_bytes()),
        ("d.json", b"{bad"),
    ]
    source = open_source(str(write_tar(tmp_path / "s.tar", entries)))
    assert [sample.captions for sample in everything(source).values()] == [("from json",)]
    assert [problem.message for problem in source.problems] == [
        "no caption",
        "no image",
        "no caption",
    ]


def test_truncated_shard_gives_samples_before_the_end(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "s.tar", shard_samples(10))
    data = path.read_bytes()
    complete = everything(open_source(str(path)))
    path.write_bytes(data[: 512 * 4 * 5 + 700])
    source = open_source(str(path))
    assert 4 <= len(everything(source)) < 10
    assert everything(source).items() <= complete.items()
    assert "cut short" in source.problems[-1].message
    image = everything(source)["s.tar/00003.jpg"].image
    path.write_bytes(data[:512])
    with pytest.raises(BadImage, match="truncated"):
        image.open()


@pytest.mark.parametrize(
    ("name", "message"),
    {
        "s-{0..3}.tar": r"s-1\.tar: no such shard \(3 of 4",
        "s-{0..99999999}.tar": "100,000,000 shards",
        "s-{0..99999999999999999999}.tar": "no such shard",
        "s-${HOME}.tar": "no such shard",
        "gone.tar": "no such",
        "z.tar": "gunzip",
        "not.tar": "not a tar file",
    }.items(),
)
def test_clear_errors(tmp_path: Path, name: str, message: str) -> None:
    write_tar(tmp_path / "s-0.tar", shard_samples(1))
    with tarfile.open(tmp_path / "z.tar", "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("x"))
    (tmp_path / "not.tar").write_bytes(b"hello" * 1000)
    with pytest.raises(UserError, match=message):
        open_source(str(tmp_path / name))


def test_no_command_is_run() -> None:
    with pytest.raises(UserError):
        open_source("webdataset:pipe:echo hello > owned")
    assert not Path("owned").exists()


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_agree_with_tarfile(form: int) -> None:
    stream = io.BytesIO()
    names = [
        "a.jpg",
        "d/" * 40 + "b.jpg",
        "é" * 30 + ".txt",
        "x" * 99,
        "n" * (99 if form == 0 else 300),
    ]
    with tarfile.open(fileobj=stream, mode="w", format=form) as tar:
        for number, name in enumerate(names):
            add_member(tar, name, bytes([number]) * number * 300)
    stream.seek(0)
    with tarfile.open(fileobj=stream) as tar:
        theirs = [(item.name, item.offset_data, item.size) for item in tar]
    ours = [(item.name, item.offset, item.size) for item in members(stream, len(stream.getvalue()))]
    assert ours == theirs


def test_shards_written_by_webdataset(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    with webdataset.TarWriter(str(tmp_path / "w.tar")) as writer:
        writer.write(
            {
                "__key__": "k",
                "jpg": image_bytes(3),
                "txt": "hello",
                "json": {"captions": ["a", "b"]},
            }
        )
    assert everything(open_source(str(tmp_path / "w.tar")))["w.tar/k.jpg"].captions == ("a", "b")
