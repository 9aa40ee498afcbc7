"""Captions in XMP, IPTC, EXIF, and in JSON files of Google Takeout and osxphotos."""

import json
import shutil
import subprocess
import tempfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image
from source_helpers import everything, image_bytes

from m1clip.data.lint import lint
from m1clip.data.sources import DataSource, open_source
from m1clip.data.sources.base import MAX_CAPTION, MAX_TEXT_BYTES
from m1clip.data.sources.metadata import CAPTION_KINDS
from m1clip.data.sources.photo_metadata.sidecars import takeout_names
from m1clip.data.sources.photo_metadata.text import clean_caption, file_name_caption
from m1clip.data.sources.photo_metadata.xmp import parse_xmp
from m1clip.errors import UserError

Write = Callable[[Iterable[str]], Path]
UTF8_MARKER = (1, 90, b"\x1b%G")


def xmp(properties: str) -> str:
    return (
        '<?xpacket begin="\ufeff" id="W5M0MpCehiHzreSzNTczkc9d"?>'
        '<x:xmpmeta xmlns:x="adobe:ns:meta/">'
        '<rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#" '
        'xmlns:dc="http://purl.org/dc/elements/1.1/" '
        'xmlns:lr="http://ns.adobe.com/lightroom/1.0/" '
        'xmlns:digiKam="http://www.digikam.org/ns/1.0/">'
        f'<rdf:Description rdf:about="">{properties}</rdf:Description></rdf:RDF></x:xmpmeta>'
        '<?xpacket end="w"?>'
    )


def description(text: str, language: str = "x-default") -> str:
    item = f'<rdf:li xml:lang="{language}">{text}</rdf:li>'
    return f"<dc:description><rdf:Alt>{item}</rdf:Alt></dc:description>"


def bag(tag: str, *items: str) -> str:
    inside = "".join(f"<rdf:li>{item}</rdf:li>" for item in items)
    return f"<{tag}><rdf:Bag>{inside}</rdf:Bag></{tag}>"


def app_segment(marker: int, payload: bytes) -> bytes:
    return bytes((0xFF, marker)) + (len(payload) + 2).to_bytes(2, "big") + payload


def with_segment(marker: int, payload: bytes) -> bytes:
    """A JPEG with an application segment after its first marker."""
    data = image_bytes()
    return data[:2] + app_segment(marker, payload) + data[2:]


def iptc(*fields: tuple[int, int, bytes]) -> bytes:
    """The payload of APP13 with IPTC fields: record, dataset, value."""
    data = b"".join(
        bytes((0x1C, record, dataset)) + len(value).to_bytes(2, "big") + value
        for record, dataset, value in fields
    )
    data += b"\0" * (len(data) % 2)
    resource = b"8BIM\x04\x04\0\0" + len(data).to_bytes(4, "big") + data
    return b"Photoshop 3.0\0" + resource


def save(path: Path, **options: Any) -> Path:
    Image.new("RGB", (24, 16), (9, 100, 50)).save(path, **options)
    return path


def exif_of(tags: dict[int, object], user_comment: bytes | None = None) -> Image.Exif:
    exif = Image.Exif()
    for tag, value in tags.items():
        exif[tag] = value
    if user_comment is not None:
        exif.get_ifd(0x8769)[0x9286] = user_comment
    return exif


def read(root: Path) -> DataSource:
    source = open_source(f"metadata:{root}")
    assert isinstance(source, DataSource)
    return source


def captions(root: Path, name: str = "a.jpg") -> tuple[str, ...]:
    return everything(read(root))[name].captions


@pytest.mark.parametrize("name", ["a.jpg.xmp", "a.xmp", "a.XMP"])
def test_xmp_sidecar_has_description_title_and_keywords(images: Write, name: str) -> None:
    root = images(["a.jpg"])
    text = xmp(
        description("A dog on a beach")
        + "<dc:title><rdf:Alt><rdf:li>Rex</rdf:li></rdf:Alt></dc:title>"
        + bag("dc:subject", "dog", "beach")
        + bag("lr:hierarchicalSubject", "Animals|Dog", "Light|sunset")
        + bag("digiKam:TagsList", "Places/Spain")
    )
    (root / name).write_text(text, encoding="utf-8")
    expected = ("A dog on a beach", "Rex", "dog, beach, sunset, Spain")
    assert captions(root) == expected
    assert read(root).origin("a.jpg") == name


def test_default_language_is_used_and_properties_may_be_attributes() -> None:
    two = (
        '<dc:description><rdf:Alt><rdf:li xml:lang="de">Hund</rdf:li>'
        '<rdf:li xml:lang="x-default">dog</rdf:li></rdf:Alt></dc:description>'
    )
    assert parse_xmp(xmp(two).encode()).descriptions == ["dog"]
    attribute = xmp("").replace('rdf:about=""', 'rdf:about="" dc:description="a cat"')
    assert parse_xmp(attribute.encode()).descriptions == ["a cat"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "latin-1"])
def test_xmp_in_any_encoding(encoding: str) -> None:
    text = xmp(description("Käse")).replace("\ufeff", "")
    text = text[text.index("<x:") :]
    assert parse_xmp(text.encode(encoding)).descriptions == ["Käse"]


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.webp", "a.tif"])
def test_embedded_xmp(tmp_path: Path, name: str) -> None:
    packet = xmp(description("Straße am Meer")).encode()
    if name == "a.png":
        from PIL.PngImagePlugin import PngInfo

        chunks = PngInfo()
        chunks.add_itxt("XML:com.adobe.xmp", packet.decode())
        save(tmp_path / name, pnginfo=chunks)
    elif name == "a.tif":
        save(tmp_path / name, tiffinfo={700: packet})
    else:
        save(tmp_path / name, xmp=packet)
    source = read(tmp_path)
    assert everything(source)[name].captions == ("Straße am Meer",)
    assert source.caption_kinds["XMP"] == 1


@pytest.mark.parametrize(
    ("marker", "value"),
    [((UTF8_MARKER,), "Käse".encode()), ((), "Käse".encode()), ((), "Käse".encode("latin-1"))],
)
def test_embedded_iptc(tmp_path: Path, marker: tuple[Any, ...], value: bytes) -> None:
    fields = (*marker, (2, 120, value), (2, 105, b"News"), (2, 25, b"dog"), (2, 25, b"beach"))
    (tmp_path / "a.jpg").write_bytes(with_segment(0xED, iptc(*fields)))
    assert captions(tmp_path) == ("Käse", "News", "dog, beach")
    assert read(tmp_path).caption_kinds["IPTC"] == 1


def test_wrong_utf8_in_iptc_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(with_segment(0xED, iptc(UTF8_MARKER, (2, 120, b"K\xe4se"))))
    assert captions(tmp_path) == ("K\ufffdse",)


def test_embedded_exif(tmp_path: Path) -> None:
    tags: dict[int, object] = {
        0x010E: "Käse".encode(),
        0x9C9B: "Titel\0".encode("utf-16-le"),
        0x9C9C: "Kommentar\0".encode("utf-16-le"),
        0x9C9E: "dog;beach\0".encode("utf-16-le"),
    }
    save(tmp_path / "a.jpg", exif=exif_of(tags, b"ASCII\0\0\0on a table"))
    assert captions(tmp_path) == ("Käse", "Titel", "Kommentar", "on a table", "dog, beach")


@pytest.mark.parametrize(
    "comment",
    [
        b"ASCII\0\0\0a dog",
        b"\0" * 8 + b"a dog",
        b"UNICODE\0" + "a dog".encode("utf-16-le"),
        b"UNICODE\0" + "a dog".encode("utf-16-be"),
        b"UNICODE\0" + "a dog".encode("utf-16"),
        b"JIS\0\0\0\0\0a dog",
        b"a dog",
    ],
)
def test_user_comment_in_each_encoding(tmp_path: Path, comment: bytes) -> None:
    if comment == b"a dog":
        comment = b"a dog         "
    save(tmp_path / "a.jpg", exif=exif_of({}, comment))
    assert captions(tmp_path) == ("a dog",)


LONG = "a-very-long-name-of-a-photo-that-takeout-shortens-somewhere.jpg"


@pytest.mark.parametrize(
    ("photo", "sidecar"),
    [
        ("a.jpg", "a.jpg.json"),
        ("a.jpg", "a.jpg.supplemental-metadata.json"),
        ("a.jpg", "a.jpg.supplemental-met.json"),
        ("a(1).jpg", "a.jpg(1).json"),
        ("a(1).jpg", "a.jpg.supplemental-metadata(1).json"),
        ("a-edited.jpg", "a.jpg.json"),
        (LONG, f"{LONG[:46]}.json"),
    ],
)
def test_takeout(images: Write, photo: str, sidecar: str) -> None:
    root = images([photo])
    document = {"title": photo, "description": "a dog", "people": [{"name": "Ann"}, {"name": "Bo"}]}
    (root / sidecar).write_text(json.dumps(document))
    source = read(root)
    assert everything(source)[photo].captions == ("a dog", "Ann, Bo")
    assert source.caption_kinds["Takeout"] == 1


def test_shortened_takeout_name_of_two_photos_is_not_used(images: Write) -> None:
    other = LONG.replace(".jpg", "-2.jpg")
    root = images([LONG, other])
    (root / f"{LONG[:46]}.json").write_text('{"description": "a dog"}')
    assert read(root).caption_kinds["Takeout"] == 0
    assert len(set(takeout_names(LONG))) == len(list(takeout_names(LONG)))


@pytest.mark.parametrize("sidecar", ["a.jpg.json", "a.json"])
def test_osxphotos(images: Write, sidecar: str) -> None:
    root = images(["a.jpg"])
    fields = {
        "SourceFile": "a.jpg",
        "IPTC:Caption-Abstract": "a dog",
        "XMP:Description": "a dog",
        "XMP:Title": "Rex",
        "IPTC:Keywords": ["dog", "beach"],
        "XMP:Subject": "sunset",
    }
    (root / sidecar).write_text(json.dumps([fields]))
    source = read(root)
    assert everything(source)["a.jpg"].captions == ("a dog", "Rex", "dog, beach, sunset")
    assert source.caption_kinds["osxphotos"] == 1


def test_kinds_are_preferred_in_the_documented_order(images: Write) -> None:
    root = images(["a.jpg"])
    photo = root / "a.jpg"
    save(photo, exif=exif_of({0x010E: "by EXIF"}), xmp=xmp(description("by XMP")).encode())
    sidecar = root / "a.jpg.xmp"
    sidecar.write_text(xmp(description("by sidecar")))
    (root / "a.jpg.json").write_text('{"description": "by Takeout"}')
    assert captions(root) == ("by sidecar",)
    sidecar.write_text(xmp(""))
    assert captions(root) == ("by XMP",)
    save(photo, exif=exif_of({0x010E: "by EXIF"}))
    payload = iptc((2, 120, b"by IPTC"))
    photo.write_bytes(photo.read_bytes()[:2] + app_segment(0xED, payload) + photo.read_bytes()[2:])
    assert captions(root) == ("by IPTC",)
    save(photo, exif=exif_of({0x010E: "by EXIF"}))
    assert captions(root) == ("by EXIF",)
    save(photo)
    assert captions(root) == ("by Takeout",)


@pytest.mark.parametrize(
    "text",
    [
        "OLYMPUS DIGITAL CAMERA",
        "SONY DSC  ",
        "DCIM",
        "Screenshot",
        "Screenshot 2024-01-01 at 10.00.00",
        "IMG_1234",
        "_DSC0042-edited",
        "P1010001.JPG",
        "20230101_120000",
        "holiday.jpeg",
        "12/04",
        "",
    ],
)
def test_texts_of_cameras_are_ignored(text: str) -> None:
    assert clean_caption(text) == ""


@pytest.mark.parametrize("text", ["Rex", "100 people on a bridge", "犬", "dog.", "Photo of a dog"])
def test_texts_of_users_are_kept(text: str) -> None:
    assert clean_caption(text) == text


def test_control_characters_are_removed_and_long_texts_are_fast() -> None:
    assert clean_caption("\x1b[31m a\x00\x07dog\u202e\r\n barks\x85 ") == "[31m a dog barks"
    assert len(clean_caption("_" * 10**6 + "a")) == 10**6 + 1


@pytest.mark.parametrize(
    ("name", "caption"),
    [
        ("birthday cake with candles.jpg", "birthday cake with candles"),
        ("x/two-dogs_on a beach (3).jpg", "two dogs on a beach"),
        ("IMG_1234.jpg", ""),
        ("DSC_0001-edited copy.jpg", ""),
        ("Screenshot_20230101_Chrome app.png", ""),
        ("WhatsApp Image 2023-01-01 at 10.00.00.jpeg", ""),
        ("beach.jpg", ""),
    ],
)
def test_descriptive_file_name_is_the_last_resort(name: str, caption: str) -> None:
    assert file_name_caption(name) == caption


def test_broken_sidecars_are_one_problem_each_that_names_the_file(images: Write) -> None:
    names = ["bomb", "broken", "large", "long", "nested", "text"]
    root = images([f"{name}.jpg" for name in [*names, "good"]])
    entity = '<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]>'
    (root / "bomb.xmp").write_bytes((entity + "<x>&b;</x>").encode("utf-16"))
    (root / "broken.jpg.json").write_bytes(b'{"description": \xff')
    (root / "large.xmp").write_bytes(b" " * 2 * MAX_TEXT_BYTES)
    (root / "long.xmp").write_text(xmp(description("x" * (MAX_CAPTION + 1))))
    (root / "nested.xmp").write_text("<a>" * 100_000)
    (root / "text.xmp").write_bytes(b"\xff\xfe\x00no XML")
    (root / "good.xmp").write_text(xmp(description("a dog")))
    source = read(root)
    assert list(everything(source)) == ["good.jpg"]
    assert [problem.where for problem in source.problems] == [f"{name}.jpg" for name in names]
    reasons = [
        "bomb.xmp: XMP cannot be read (declares a document type",
        "broken.jpg.json: not valid JSON",
        "large.xmp: cannot be read (larger than 1,048,576 bytes",
        "long.xmp: the caption is too long",
        "nested.xmp: XMP cannot be read (nested too deeply",
        "text.xmp: XMP cannot be read (not valid XML",
    ]
    for problem, reason in zip(source.problems, reasons, strict=True):
        assert problem.message.startswith(reason)
        assert problem.kind == "unreadable"


def test_embedded_doctype_is_rejected(tmp_path: Path) -> None:
    save(
        tmp_path / "a.jpg", xmp=b'<!DOCTYPE x [<!ENTITY a SYSTEM "file:///etc/passwd">]><x>&a;</x>'
    )
    with pytest.raises(UserError, match=r"a\.jpg: XMP cannot be read \(declares a document type"):
        read(tmp_path)


def captioned_folder(images: Write) -> Path:
    root = images([f"IMG_{number:04d}.jpg" for number in range(4)])
    (root / "IMG_0000.xmp").write_text(xmp(description("a dog")))
    (root / "IMG_0001.jpg.json").write_text('{"description": "a cat"}')
    return root


def test_plain_folder_is_recognized_and_counts_are_reported(images: Write) -> None:
    root = captioned_folder(images)
    source = open_source(str(root))
    assert isinstance(source, DataSource)
    assert source.format == "metadata"
    line = "captions in the metadata of 2 of 4 photos: "
    assert source.notes == [line + "XMP sidecar 1 (25%), Takeout 1 (25%), none 2 (50%)"]
    report = lint(source)
    assert list(report.facts["caption_kinds"]) == [*CAPTION_KINDS, "none"]
    assert report.facts["caption_kinds"]["none"] == 2
    assert "XMP sidecar 1 (25%)" in report.to_text()
    (skipped,) = [finding for finding in report.findings if finding.code == "skipped-empty-caption"]
    assert skipped.count == 2


def test_fingerprint_changes_with_a_caption(images: Write) -> None:
    root = captioned_folder(images)
    before = read(root)
    again = read(root)
    (root / "IMG_0000.xmp").write_text(xmp(description("a horse")))
    after = read(root)

    def fingerprint(source: DataSource) -> str:
        return source.fingerprint(list(everything(source).values()))

    assert fingerprint(before) == fingerprint(again) != fingerprint(after)


def test_tables_text_files_and_class_folders_are_preferred(images: Write) -> None:
    root = captioned_folder(images)
    (root / "IMG_0000.txt").write_text("a dog")
    assert open_source(str(root)).name == str(root)
    formats = [open_source(str(root))]
    (root / "captions.csv").write_text("image,caption\nIMG_0000.jpg,a dog\n")
    formats.append(open_source(str(root)))
    classes = root / "classes"
    for name in ("cat", "dog"):
        (classes / name).mkdir(parents=True)
        (classes / name / "1.jpg").write_bytes(image_bytes())
        (classes / name / "1.xmp").write_text(xmp(description("a pet")))
    formats.append(open_source(str(classes)))
    assert [getattr(source, "format", None) for source in formats] == ["txt", "csv", "classes"]


def test_table_of_other_columns_is_still_an_error(images: Write) -> None:
    root = captioned_folder(images)
    (root / "list.csv").write_text("bild,text_en\nIMG_0000.jpg,a dog\n")
    with pytest.raises(UserError, match="no image and no caption column"):
        open_source(str(root))


@pytest.mark.parametrize("prefix", ["", "metadata:"])
def test_photos_without_captions_are_an_error_that_lists_the_ways_on(
    images: Write, prefix: str
) -> None:
    root = images(["my photos/IMG_0000.jpg", "my photos/IMG_0001.jpg"]) / "my photos"
    with pytest.raises(UserError, match="images but no captions; label some") as raised:
        open_source(f"{prefix}{root}")
    (ways,) = raised.value.__notes__
    for command in ("index", "serve", "data caption", "data template"):
        assert f"m1clip {command} '{root}'" in ways
    assert (f"m1clip train metadata:'{root}'" in ways) == (prefix == "")
    assert "filenames:" not in ways  # IMG_0000 is no caption
    assert len(ways.splitlines()) < 20  # one screen


def test_split_folders_are_used(images: Write) -> None:
    root = images(["train/a.jpg", "val/b.jpg"])
    for name in ("train/a.xmp", "val/b.xmp"):
        (root / name).write_text(xmp(description("a dog")))
    assert open_source(str(root)).splits() == ("train", "val")


def check_never_raises(files: dict[str, bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, data in files.items():
            (Path(folder) / name).write_bytes(data)
        try:
            source = read(Path(folder))
        except UserError:
            return
        for sample in everything(source).values():
            assert all(text.strip() and text.encode() for text in sample.captions)


EXIF_START = b"Exif\0\0"
XMP_START = b"http://ns.adobe.com/xap/1.0/\0"
RESOURCE_START = b"Photoshop 3.0\x008BIM\x04\x04\0\0\0\0\0\x20"
SMALL_TIFF = b"II*\0\x08\0\0\0\x01\0\x0e\x01\x02\0\xff\xff\xff\xff\x1a\0\0\0"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(payload=st.binary(max_size=200), start=st.sampled_from([b"", EXIF_START, XMP_START]))
@example(payload=SMALL_TIFF, start=EXIF_START)
@example(payload=b"<a", start=XMP_START)
def test_arbitrary_bytes_never_raise_another_error(payload: bytes, start: bytes) -> None:
    for ending in (".xmp", ".jpg.json"):
        check_never_raises({"a.jpg": image_bytes(), f"a{ending}": payload})
    check_never_raises({"a.jpg": with_segment(0xE1, start + payload)})
    for resource in (b"Photoshop 3.0\0" + payload, RESOURCE_START + payload, payload):
        check_never_raises({"a.jpg": with_segment(0xED, resource)})


@pytest.mark.skipif(shutil.which("exiftool") is None, reason="exiftool is not installed")
@pytest.mark.parametrize(
    ("option", "kind"),
    [
        ("-XMP-dc:Description=Käse am Meer", "XMP"),
        ("-IPTC:Caption-Abstract=Käse am Meer", "IPTC"),
        ("-EXIF:ImageDescription=Käse am Meer", "EXIF"),
        ("-EXIF:UserComment=Käse am Meer", "EXIF"),
        ("-EXIF:XPComment=Käse am Meer", "EXIF"),
    ],
)
def test_files_of_exiftool(images: Write, option: str, kind: str) -> None:
    root = images(["a.jpg"])
    charset = ("-charset", "iptc=utf8", "-codedcharacterset=utf8") if kind == "IPTC" else ()
    command = ["exiftool", "-overwrite_original", *charset, option, str(root / "a.jpg")]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    source = read(root)
    assert everything(source)["a.jpg"].captions == ("Käse am Meer",)
    assert source.caption_kinds[kind] == 1


@pytest.mark.skipif(shutil.which("exiftool") is None, reason="exiftool is not installed")
def test_png_of_exiftool_has_its_metadata_behind_the_pixels(tmp_path: Path) -> None:
    photo = save(tmp_path / "a.png")
    options = ("-XMP-dc:Description=Käse am Meer", "-EXIF:UserComment=by the sea", "-keywords=x")
    command = ["exiftool", "-overwrite_original", *options, str(photo)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    assert captions(tmp_path, "a.png")[0] == "Käse am Meer"


@pytest.mark.parametrize("is_compressed", [False, True])
def test_xmp_behind_the_pixels_of_a_png(tmp_path: Path, is_compressed: bool) -> None:
    packet = xmp(description("Straße am Meer")).encode()
    text = zlib.compress(packet) if is_compressed else packet
    payload = b"XML:com.adobe.xmp\0" + bytes((is_compressed, 0)) + b"\0\0" + text
    chunk = b"iTXt" + payload
    chunk = len(payload).to_bytes(4, "big") + chunk + zlib.crc32(chunk).to_bytes(4, "big")
    data = save(tmp_path / "a.png").read_bytes()
    (tmp_path / "a.png").write_bytes(data[:-12] + chunk + data[-12:])  # before IEND
    assert captions(tmp_path, "a.png") == ("Straße am Meer",)


def test_compressed_bomb_in_a_png_is_a_problem(images: Write) -> None:
    root = images(["b.png"])
    (root / "b.xmp").write_text(xmp(description("fine")))
    data = save(root / "a.png").read_bytes()
    bomb = zlib.compress(b" " * (MAX_TEXT_BYTES + 1))
    payload = b"XML:com.adobe.xmp\0\1\0\0\0" + bomb
    chunk = b"iTXt" + payload
    chunk = len(payload).to_bytes(4, "big") + chunk + zlib.crc32(chunk).to_bytes(4, "big")
    (root / "a.png").write_bytes(data[:-12] + chunk + data[-12:])
    (problem,) = read(root).problems
    assert "larger than 1,048,576 bytes" in str(problem)


def test_description_and_keywords_may_be_of_different_kinds(images: Write) -> None:
    """A description of a lower kind is not lost to the keywords of a higher one."""
    root = images(["a.jpg"])
    exif = exif_of({0x010E: "A dog on a beach"})
    save(root / "a.jpg", exif=exif, xmp=xmp(bag("dc:subject", "dog", "sea")).encode())
    assert captions(root) == ("A dog on a beach", "dog, sea")
    assert read(root).caption_kinds["EXIF"] == 1
    (root / "a.jpg.json").write_text('{"description": "from Takeout"}')
    assert captions(root) == ("A dog on a beach", "dog, sea")


@pytest.mark.parametrize(
    "albums",
    [
        ("2023", "2024"),
        ("2023/05", "2023/06"),
        ("2023-05-12 Beach", "2023-06-01 Party"),
        ("Photos from 2022", "Photos from 2023"),
        ("DCIM/100CANON", "DCIM/101CANON"),
        ("20230512", "20230601"),
        ("2023 Summer", "2024 Paris"),
        ("May 2023", "winter_2024"),
        ("12.05.2023", "06-2024"),
        ("2023", "Birthday"),
    ],
)
def test_albums_are_not_classes(images: Write, albums: tuple[str, str]) -> None:
    root = images([f"{album}/IMG_{number}.jpg" for number, album in enumerate(albums)])
    for photo in root.rglob("*.jpg"):
        save(photo, exif=exif_of({0x010E: f"A dog on {photo.stem[-1]} beaches"}))
    assert open_source(str(root)).format == "metadata"
    assert open_source(f"classes:{root}").format == "classes"


@pytest.mark.parametrize(
    "names", [("0", "1"), ("Audi S4 2012", "Fiat 500 2012"), ("1999999", "2000000")]
)
def test_numbers_and_other_names_are_classes(images: Write, names: tuple[str, str]) -> None:
    root = images([f"{name}/a.jpg" for name in names])
    assert open_source(str(root)).format == "classes"


def test_folder_is_recognized_whatever_the_order_of_its_captions(images: Write) -> None:
    """300 photos of which each third has no caption: every third one is not a fair sample."""
    root = images([f"IMG_{number:04d}.jpg" for number in range(300)])
    for number in range(300):
        if number % 3:
            sidecar = root / f"IMG_{number:04d}.jpg.xmp"
            sidecar.write_text(xmp(description(f"photo of a dog {number}")))
    assert len(everything(open_source(str(root)))) == 200
