"""webdataset shards are read in place, never unpacked."""

from __future__ import annotations

import io
import json
import pickle
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from source_helpers import everything, image_bytes

from m1clip.data.images import BadImage
from m1clip.data.sources import open_source
from m1clip.data.sources.shards import members
from m1clip.errors import UserError

TarOf = Callable[[Path, Iterable[tuple[str, bytes]]], Path]
Samples = Callable[..., list[tuple[str, bytes]]]


def test_pattern_folder_and_file(tmp_path: Path, tar_of: TarOf, samples: Samples) -> None:
    for shard in range(3):
        tar_of(tmp_path / f"shard-{shard:03d}.tar", samples(4))
    assert len(everything(open_source(str(tmp_path / "shard-{000..001}.tar")))) == 8
    assert len(everything(open_source(str(tmp_path / "shard-*-{0..1}.tar".replace("-*-", "-00"))))) == 8
    assert len(everything(open_source(str(tmp_path / "shard-000.tar")))) == 4
    source = open_source(str(tmp_path))
    found = everything(source)
    assert len(found) == 12
    sample = found["shard-002.tar/00003.jpg"]
    assert sample.captions == ("caption 3",)
    assert abs(sample.image.open().getpixel((3, 3))[0] - 60) < 6  # type: ignore[index]
    assert pickle.loads(pickle.dumps(sample)) == sample


def test_split_from_folder_name_and_json(tmp_path: Path, tar_of: TarOf, samples: Samples) -> None:
    tar_of(tmp_path / "train/0.tar", samples(2))
    tar_of(tmp_path / "val-000.tar", samples(1))
    about = json.dumps({"captions": ["x", "y"], "split": "test"}).encode()
    tar_of(tmp_path / "more.tar", [("k.png", image_bytes(kind="PNG")), ("k.txt", b"x"), ("k.json", about)])
    source = open_source(str(tmp_path))
    assert [len(source.samples(split)) for split in source.splits()] == [2, 1, 1]
    assert source.samples("test")[0].captions == ("x", "y")


def test_json_caption_and_incomplete_samples(tmp_path: Path, tar_of: TarOf) -> None:
    entries = [("a.webp", image_bytes(kind="WEBP")), ("a.json", b'{"caption": "from json"}')]
    entries += [("b.jpg", image_bytes()), ("c.txt", b"alone"), ("d.jpg", image_bytes()), ("d.json", b"{bad")]
    source = open_source(str(tar_of(tmp_path / "s.tar", entries)))
    assert [sample.captions for sample in everything(source).values()] == [("from json",)]
    assert [problem.what for problem in source.problems] == ["no caption", "no image", "no caption"]


def test_unsafe_members_are_skipped_and_counted(tmp_path: Path, tar_of: TarOf, samples: Samples) -> None:
    path = tar_of(
        tmp_path / "in/s.tar", [*samples(1), ("../evil.jpg", b"x"), ("/abs.jpg", b"x"), ("a/../../b.txt", b"x")]
    )
    with tarfile.open(path, "a") as tar:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE):
            info = tarfile.TarInfo("link.jpg")
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
    source = open_source(str(path))
    assert len(everything(source)) == 1
    assert [problem.kind for problem in source.problems] == ["unsafe-member"] * 6
    assert sorted(item.name for item in tmp_path.rglob("*")) == ["in", "s.tar"]


def test_a_shard_is_never_unpickled(tmp_path: Path, tar_of: TarOf, samples: Samples) -> None:
    class Boom:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (exec, ("raise SystemExit('unpickled')",))

    entries = [*samples(1), ("00001.jpg", image_bytes()), ("00001.pyd", pickle.dumps(Boom())), ("00001.txt", b"x")]
    assert len(everything(open_source(str(tar_of(tmp_path / "s.tar", entries))))) == 2


def test_a_truncated_shard_gives_what_is_before_the_cut(tmp_path: Path, tar_of: TarOf, samples: Samples) -> None:
    path = tar_of(tmp_path / "s.tar", samples(10))
    data = path.read_bytes()
    complete = everything(open_source(str(path)))
    path.write_bytes(data[: 512 * 4 * 5 + 700])
    source = open_source(str(path))
    assert 4 <= len(everything(source)) < 10
    assert everything(source).items() <= complete.items()
    assert "cut short" in source.problems[-1].what
    image = everything(source)["s.tar/00003.jpg"].image
    path.write_bytes(data[:512])
    with pytest.raises(BadImage, match="truncated"):
        image.open()


def test_clear_errors(tmp_path: Path, tar_of: TarOf, samples: Samples) -> None:
    tar_of(tmp_path / "s-0.tar", samples(1))
    with tarfile.open(tmp_path / "z.tar", "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("x"))
    (tmp_path / "not.tar").write_bytes(b"hello" * 1000)
    cases = {
        "s-{0..3}.tar": r"s-1\.tar: no such shard \(3 of 4",
        "s-{0..99999999}.tar": "100,000,000 shards",
        "s-{0..99999999999999999999}.tar": "not a range",
        "s-{a,{b,c}}.tar": "nested braces",
        "s-${HOME}.tar": "are not supported",
        "gone.tar": "no such",
        "z.tar": "gunzip",
        "not.tar": "not a tar file",
    }
    for name, message in cases.items():
        with pytest.raises(UserError, match=message):
            open_source(str(tmp_path / name))
    with pytest.raises(UserError):
        open_source("webdataset:pipe:echo hello > owned")
    assert not Path("owned").exists()


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_agree_with_tarfile(form: int) -> None:
    stream = io.BytesIO()
    names = ["a.jpg", "d/" * 40 + "b.jpg", "é" * 30 + ".txt", "x" * 99] + (
        ["n" * 300] if form != tarfile.USTAR_FORMAT else []
    )
    with tarfile.open(fileobj=stream, mode="w", format=form) as tar:
        for number, name in enumerate(names):
            info = tarfile.TarInfo(name)
            info.size = number * 300
            tar.addfile(info, io.BytesIO(bytes([number]) * info.size))
    stream.seek(0)
    with tarfile.open(fileobj=stream) as tar:
        theirs = [(item.name, item.offset_data, item.size) for item in tar]
    ours = [(item.name, item.offset, item.size) for item in members(stream, len(stream.getvalue()))]
    assert ours == theirs


def test_shards_written_by_webdataset(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    with webdataset.TarWriter(str(tmp_path / "w.tar")) as writer:
        writer.write({"__key__": "k", "jpg": image_bytes(3), "txt": "hello", "json": {"captions": ["a", "b"]}})
    assert everything(open_source(str(tmp_path / "w.tar")))["w.tar/k.jpg"].captions == ("a", "b")
