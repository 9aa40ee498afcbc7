"""Downloads from the Hugging Face Hub, from a local server that speaks its protocol."""

import gzip
import hashlib
import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from fake_hub import TOKEN, FakeHub, Repository
from photos import make_photos, save_model

import m1clip
from m1clip.cli.main import main
from m1clip.errors import UserError
from m1clip.model import hub
from m1clip.model.catalog import CATALOG
from m1clip.model.hub import download, plan_download
from m1clip.model.hub_files import cached_snapshot, repository_folder
from m1clip.model.named import hub_repository, model_name, resolve

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("huggingface_hub") is None, reason="needs the extra hub"
)
WEIGHTS = bytes(range(256)) * 400  # larger than one request of a small file
FILES = {
    "config.json": b'{"format": 1}',
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": WEIGHTS[::-1],
    "tokenizer.json": b"{}",
    "README.md": b"# a model",
    "../evil.txt": b"outside of the folder",
}
VARIABLES = ("HF_HOME", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


@pytest.fixture
def fake_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A running server with the repository someone/model.

    The cache and the current folder are empty.
    """
    server = FakeHub()
    server.repositories["someone/model"] = Repository(dict(FILES))
    server.start()
    for name in (*VARIABLES, "HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr(hub, "RECONNECT_SECONDS", 0.0)
    monkeypatch.setattr(hub, "CHUNK_BYTES", 1000)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    yield server
    server.stop()


def run(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main([str(word) for word in words])
    printed = capsys.readouterr()
    return int(caught.value.code or 0), printed.out, printed.err


def one_line(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The error of a command, which must be one line."""
    code, _, error = run(capsys, *words)
    assert code == 2
    assert error.startswith("m1clip: ")
    assert error.count("\n") == 1, error
    return error


def test_only_the_files_of_the_model_are_fetched_and_linked_in_the_cache(fake_hub: FakeHub) -> None:
    folder = download("someone/model")
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    blob = (folder / "model.safetensors").resolve()
    assert blob.name == hashlib.sha256(WEIGHTS).hexdigest()
    commit = fake_hub.repositories["someone/model"].commit
    assert (repository_folder("someone/model") / "refs" / "main").read_text() == commit
    assert folder.name == commit
    assert list(repository_folder("someone/model").rglob("*.incomplete")) == []


def test_what_m1clip_downloads_is_found_by_huggingface_hub(fake_hub: FakeHub) -> None:
    from huggingface_hub import hf_hub_download

    folder = download("someone/model")
    downloaded = hf_hub_download(
        "someone/model",
        "model.safetensors",
        cache_dir=os.environ["HF_HUB_CACHE"],
        local_files_only=True,
    )
    assert Path(downloaded) == folder / "model.safetensors"


def test_what_huggingface_hub_downloads_is_found_without_a_request(fake_hub: FakeHub) -> None:
    from huggingface_hub import hf_hub_download

    for name in ("config.json", "model.safetensors"):
        path = hf_hub_download(
            "someone/model", name, cache_dir=os.environ["HF_HUB_CACHE"], endpoint=fake_hub.url
        )
    assert fake_hub.requests
    fake_hub.requests.clear()
    assert download("someone/model") == Path(path).parent
    assert resolve("someone/model") == Path(path).parent
    assert fake_hub.requests == []


@pytest.mark.parametrize("ranges", [True, False])
def test_lost_connection_is_continued_from_where_it_ended(fake_hub: FakeHub, ranges: bool) -> None:
    fake_hub.ranges = ranges
    fake_hub.cut_after, fake_hub.cuts = 30_000, 2
    folder = download("someone/model")
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert fake_hub.large_requests() == [
        "",
        "bytes=30000-",
        "bytes=60000-" if ranges else "bytes=30000-",
    ]


def test_interrupted_download_is_continued_by_the_next_call(
    fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = hub._Transfer.append

    def interrupt(transfer: hub._Transfer, chunk: bytes) -> None:
        original(transfer, chunk)
        if transfer.done > 50_000:
            raise KeyboardInterrupt

    monkeypatch.setattr(hub._Transfer, "append", interrupt)
    with pytest.raises(KeyboardInterrupt):
        download("someone/model")
    assert cached_snapshot("someone/model") is None, "not taken for a complete model"
    plan = plan_download("someone/model")
    assert 50_000 < plan.present_bytes < 60_000
    monkeypatch.setattr(hub._Transfer, "append", original)
    folder = download("someone/model")
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    first, second = fake_hub.large_requests()
    assert first == ""
    assert int(second.removeprefix("bytes=").rstrip("-")) > 50_000


def test_connection_that_stays_lost_is_an_error_and_keeps_what_is_there(
    fake_hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_hub.cut_after, fake_hub.cuts = 0, 100
    error = one_line(capsys, "download", "someone/model", "--yes")
    assert "cannot reach" in error
    assert "run again to continue" in error
    assert 100 - fake_hub.cuts == hub.ATTEMPTS
    fake_hub.cuts = 0
    assert download("someone/model").is_dir()


@pytest.mark.parametrize("change", [lambda body: body[:-1] + b"x", lambda body: body + b"more"])
def test_tampered_file_is_rejected_and_deleted(
    fake_hub: FakeHub, capsys: pytest.CaptureFixture[str], change: Callable[[bytes], bytes]
) -> None:
    fake_hub.tampered = change(WEIGHTS[::-1])
    error = one_line(capsys, "download", "someone/model", "--yes")
    assert "model.safetensors of someone/model: not the file that the Hub lists" in error
    assert "deleted" in error
    contents = [path.read_bytes() for path in repository_folder("someone/model").glob("blobs/*")]
    assert sorted(map(len, contents)) == [2, 13], "only the two small files"
    assert "not on this computer" in one_line(capsys, "export", "someone/model")


def test_tampered_small_file_is_rejected_by_the_hash_of_git(fake_hub: FakeHub) -> None:
    plan = plan_download("someone/model")
    fake_hub.repositories["someone/model"].files["tokenizer.json"] = b"[]"
    # The server still has the commit of the plan.
    commit = plan.commit
    assert fake_hub.repositories["someone/model"].commit != commit
    fake_hub.repositories["someone/model"].__class__ = type(
        "Frozen", (Repository,), {"commit": commit}
    )
    with pytest.raises(UserError, match=r"tokenizer.json of .* not the file that the Hub lists"):
        hub.fetch(plan)


def test_damaged_file_in_the_cache_is_downloaded_again(fake_hub: FakeHub) -> None:
    folder = download("someone/model")
    blob = (folder / "model.safetensors").resolve()
    blob.write_bytes(b"x" + WEIGHTS[1:])
    assert download("someone/model") == folder
    assert blob.read_bytes() == WEIGHTS
    assert len(fake_hub.large_requests()) == 2


def test_file_that_was_deleted_from_the_cache_is_downloaded_again(fake_hub: FakeHub) -> None:
    folder = download("someone/model")
    (folder / "tokenizer.json").resolve().unlink()
    assert download("someone/model") == folder
    assert (folder / "tokenizer.json").read_bytes() == FILES["tokenizer.json"]


def test_update_fetches_only_what_has_changed(fake_hub: FakeHub) -> None:
    first = download("someone/model")
    fake_hub.repositories["someone/model"].files["config.json"] = b'{"format": 1, "new": 1}'
    assert download("someone/model") == first
    second = download("someone/model", update=True)
    assert second != first
    assert (second / "config.json").read_bytes() == b'{"format": 1, "new": 1}'
    assert len(fake_hub.large_requests()) == 1
    assert resolve("someone/model") == second


def test_busy_server_is_asked_again(fake_hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_download("someone/model")
    fake_hub.busy = 3
    assert hub.fetch(plan).is_dir()
    fake_hub.busy = 100
    assert "answers 503; run again later" in one_line(capsys, "download", "other/model", "--yes")


def test_gated_model_names_the_page_and_the_token(
    fake_hub: FakeHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_hub.repositories["someone/model"].gated = True
    error = one_line(capsys, "download", "someone/model", "--yes")
    page = f"{fake_hub.url}/someone/model"
    assert f"gated: accept its conditions at {page}, then set HF_TOKEN" in error
    monkeypatch.setenv("HF_TOKEN", "hf_without_access")
    error = one_line(capsys, "download", "someone/model", "--yes")
    assert f"accept its conditions at {page}, with the account of your token" in error
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert download("someone/model").is_dir()
    sent = {bool(token) for path, token in fake_hub.tokens if path.startswith("/cdn/")}
    assert sent == {False}, "the token goes to the Hub alone, not to where it redirects"


def test_missing_and_private_repository_are_one_line(
    fake_hub: FakeHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = one_line(capsys, "download", "some/nothing", "--yes")
    assert f"some/nothing: no such repository at {fake_hub.url}; if it is private: set" in error
    fake_hub.repositories["someone/model"].private = True
    assert "if it is private" in one_line(capsys, "download", "someone/model", "--yes")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert download("someone/model").is_dir()
    error = one_line(capsys, "download", "some/nothing", "--yes")
    assert "private" not in error


def test_repository_without_a_model_is_one_line(
    fake_hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_hub.repositories["a/dataset"] = Repository(
        {"README.md": b"#", "model.safetensors": WEIGHTS}
    )
    error = one_line(capsys, "download", "a/dataset", "--yes")
    assert (
        "has no model that m1clip reads (looked for open_clip_config.json or config.json" in error
    )
    assert not repository_folder("a/dataset").exists()


def test_offline_mode_and_addresses_that_nobody_answers(
    fake_hub: FakeHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    error = one_line(capsys, "download", "someone/model", "--yes")
    assert "HF_HUB_OFFLINE is set, so nothing is downloaded" in error
    assert fake_hub.requests == []
    monkeypatch.delenv("HF_HUB_OFFLINE")
    download("someone/model")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert download("someone/model").is_dir(), "what is there needs no network"
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # the port of "discard"
    error = one_line(capsys, "download", "some/other", "--yes")
    assert "cannot reach http://127.0.0.1:9" in error
    for address in ("http://hub:port", f"http://{'a' * 64}.org"):
        monkeypatch.setenv("HF_ENDPOINT", address)
        assert "cannot reach" in one_line(capsys, "download", "some/other", "--yes")
    monkeypatch.setenv("HF_TOKEN", "hf_ü")
    assert "can't encode" in one_line(capsys, "download", "some/other", "--yes")
    monkeypatch.setenv("HF_ENDPOINT", "huggingface.co")
    assert "begins with https://" in one_line(capsys, "download", "some/other", "--yes")


def test_disk_that_is_too_small_is_reported_before_the_download(
    fake_hub: FakeHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")._replace(free=hub.SPARE_BYTES + 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    error = one_line(capsys, "download", "someone/model", "--yes")
    assert "to download, but only 50 MB free" in error
    assert fake_hub.large_requests() == []
    assert not repository_folder("someone/model").exists()


def test_disk_that_is_full_in_the_middle_is_one_line(
    fake_hub: FakeHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(transfer: hub._Transfer, chunk: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hub._Transfer, "append", fail)
    assert "the disk is full" in one_line(capsys, "download", "someone/model", "--yes")


def test_download_shows_the_size_and_asks(
    fake_hub: FakeHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = one_line(capsys, "download", "someone/model")
    assert "no terminal to ask on; add --yes" in error
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda prompt: "n")
    code, out, _ = run(capsys, "download", "someone/model")
    assert code == 2
    assert "license    mit" in out
    assert "size       102 kB" in out
    assert fake_hub.large_requests() == []
    monkeypatch.setattr("builtins.input", lambda prompt: "y")
    code, out, _ = run(capsys, "download", "someone/model")
    assert code == 0
    assert "use it     m1clip index ~/Pictures --model someone/model" in out
    code, out, _ = run(capsys, "download", "someone/model")
    assert "is on this computer" in out


@pytest.mark.parametrize(
    "listing",
    [
        b"no json",
        b"[]",
        b'{"sha": "../../x"}',
        b'{"sha": "' + b"0" * 40 + b'", "siblings": 7}',
        b'{"sha": "' + b"0" * 40 + b'", "siblings": [{"rfilename": "config.json", "size": 3, '
        b'"blobId": "../../../x"}, {"rfilename": "model.safetensors", "size": 3, "blobId": 5}]}',
        # Too large for a float.
        json.dumps(
            {
                "sha": "0" * 40,
                "siblings": [
                    {"rfilename": name, "size": 10**4000, "blobId": "0" * 40}
                    for name in ("config.json", "model.safetensors")
                ],
            }
        ).encode(),
    ],
)
def test_answer_that_is_not_of_the_hub_is_one_line_and_writes_nothing(
    fake_hub: FakeHub,
    listing: bytes,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from fake_hub import Handler

    monkeypatch.setattr(Handler, "send_listing", lambda handler, name: handler.send(200, listing))
    one_line(capsys, "download", "someone/model", "--yes")
    assert not (tmp_path / "cache").exists()


def test_compressed_answer_is_not_unpacked(
    fake_hub: FakeHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fake_hub import Handler

    bomb = gzip.compress(gzip.compress(b" " * 10**6))
    headers = {"Content-Encoding": "gzip, gzip"}
    monkeypatch.setattr(Handler, "send_listing", lambda self, name: self.send(200, bomb, headers))
    monkeypatch.setattr(hub, "MAX_LISTING_BYTES", 10**5)
    assert "no JSON" in one_line(capsys, "download", "someone/model", "--yes")


# Names


def test_names_of_the_catalog_and_of_the_hub_and_paths(fake_hub: FakeHub) -> None:
    repository = CATALOG["laion-vit-b-32"].repository
    assert hub_repository("laion-vit-b-32") == repository
    assert hub_repository(f"hf-hub:{repository}") == repository
    assert model_name(Path(repository)) == "laion-vit-b-32"
    assert model_name("some/other") == "some/other"
    for path in ("runs/demo", "photos", "/a/b", "../a", "a/b/c"):
        assert hub_repository(path) is None
    Path("laion-vit-b-32").mkdir()
    Path("some").mkdir()
    assert hub_repository("laion-vit-b-32") is None, "a folder of that name comes first"
    assert hub_repository("some/other") is None, "a path below an existing folder"


def test_name_with_a_typing_mistake_is_suggested(
    fake_hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["download", "laion-vit-b32"], ["export", "laion-vit-b32"], ["models", "genral"]):
        assert "did you mean" in one_line(capsys, *words)


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small CLIP with random weights in m1clip's own layout."""
    return save_model(tmp_path_factory.mktemp("hub-model") / "model")


def test_no_other_command_downloads(
    fake_hub: FakeHub, clip_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_hub.add_folder("small/clip", clip_folder)
    photos = make_photos(Path("photos"), 2)
    image = next(photos.rglob("*.jpg"))
    for words in (
        ["index", photos, "--model", "small/clip"],
        ["classify", image, "--labels", "a,b", "--model", "small/clip"],
        ["eval", "small/clip", "--data", "synthetic"],
        ["export", "small/clip"],
        ["train", "synthetic", "--init", "small/clip", "--out", "run"],
        ["train", "synthetic", "--teacher", "small/clip", "--out", "run"],
        ["train", "synthetic", "--image-tower", "small/clip", "--recipe", "frozen", "--out", "run"],
    ):
        error = one_line(capsys, *map(str, words))
        assert "small/clip: not on this computer; to get it: m1clip download small/clip" in error
    run(capsys, "models")
    assert fake_hub.requests == []
    assert sorted(path.name for path in Path().iterdir()) == ["photos"]


def test_only_one_module_can_download_a_model() -> None:
    """Nothing else imports the library, or asks transformers or open_clip for a file that is not here."""
    package = Path(m1clip.__file__).parent
    for path in package.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        name = path.relative_to(package).as_posix()
        if name not in ("model/hub.py", "data/sources/hugging_face.py"):
            assert 'huggingface_hub"' not in text, name
            assert "import huggingface_hub" not in text, name
            assert "from huggingface_hub" not in text, name
        calls = text.count(".from_pretrained(")
        assert text.count("local_files_only=True") >= calls or not calls, name
        if name not in ("cli/hub.py", "__init__.py"):
            assert "m1clip.model.hub import" not in text, name


def test_downloaded_model_works_everywhere(
    fake_hub: FakeHub, clip_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_hub.add_folder("small/clip", clip_folder)
    m1clip.download("small/clip")
    fake_hub.requests.clear()
    texts = ["a dog", "a beach"]
    model, original = m1clip.load("small/clip"), m1clip.load(clip_folder)
    assert np.array_equal(model.encode_text(texts), original.encode_text(texts))

    photos = make_photos(Path("photos"), 4)
    code, out, _ = run(capsys, "index", photos, "--model", "small/clip")
    assert code == 0, out
    index = m1clip.Index(photos)
    assert index.model_path == "small/clip", "the name: the folder changes with each version"
    assert index.search("a dog").nearest
    assert len(m1clip.Index(photos, "small/clip")) == 4

    image = next(photos.rglob("*.jpg"))
    code, out, _ = run(capsys, "classify", image, "--labels", "dog,cat", "--model", "small/clip")
    assert code == 0, out
    code, out, _ = run(capsys, "export", "small/clip", "--to", "safetensors")
    assert code == 0, out
    assert m1clip.load("clip-safetensors").encode_text(texts).shape == (2, 16)
    steps = ["--steps", "2", "--batch-size", "8", "--synthetic-images", "32", "--device", "cpu"]
    train = ["train", "--data", "synthetic", "--init", "small/clip", "--precision", "fp32"]
    code, out, _ = run(capsys, *train, *steps, "--out", "run")
    assert code == 0, out
    assert m1clip.load("run").encode_text(texts).shape == (2, 16)
    assert fake_hub.requests == []


def test_speed_is_measured_and_listed(
    fake_hub: FakeHub,
    clip_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))
    monkeypatch.setattr("m1clip.cli.hub.MEASURE_SECONDS", 0.0)
    repository = CATALOG["tinyclip-39m-16"].repository
    fake_hub.add_folder(repository, clip_folder)
    listed = {model.name: model for model in m1clip.list_models()}
    assert listed["tinyclip-39m-16"].folder is None
    m1clip.download("tinyclip-39m-16")
    code, out, _ = run(capsys, "models", "--measure", "tinyclip-39m-16")
    assert code == 0
    assert "images/s on cpu" in out
    listed = {model.name: model for model in m1clip.list_models()}
    assert listed["tinyclip-39m-16"].folder == str(cached_snapshot(repository))
    assert listed["tinyclip-39m-16"].speed is not None
    _, out, _ = run(capsys, "models")
    (line,) = [line for line in out.splitlines() if line.startswith("tinyclip-39m-16")]
    assert line.split()[1] == "yes"


def test_every_figure_of_the_catalog_has_a_source() -> None:
    assert len(CATALOG) >= 12
    for model in CATALOG.values():
        assert model.parameters_source
        assert model.megabytes_source
        assert bool(model.imagenet_source) == (model.imagenet is not None)
        # Weights of float32: a wrong figure would not match the other one.
        assert abs(model.megabytes / model.parameters / 4 - 1) < 0.02, model.name
    assert len({model.repository for model in CATALOG.values()}) == len(CATALOG)


def test_docs_contain_the_table_of_the_catalog() -> None:
    root = Path(__file__).parents[2]
    spec = importlib.util.spec_from_file_location("models_table", root / "tools/models_table.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.markdown() in (root / "docs/models.md").read_text(encoding="utf-8")
