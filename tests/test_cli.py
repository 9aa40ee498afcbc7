"""The command line: options, overrides, help, and one-line errors."""

import dataclasses
import errno
import json
import os
import shlex
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest
from photos import make_photos, save_model
from rich.console import Console
from small_run import environment

import m1clip.training.run
from m1clip import __version__
from m1clip.cli import main as cli
from m1clip.cli.app import app
from m1clip.cli.search import _report_lines
from m1clip.config import NAMES, OTHER_TOOLS, Config, TransferConfig, make_config, to_toml
from m1clip.errors import UserError
from m1clip.search.index import Report
from m1clip.training.spec import Settings

HEAVY = ("torch", "numpy", "PIL", "tokenizers", "safetensors")


class Caught(Exception):
    """Raised with the arguments that `m1clip train` would train with."""

    def __init__(self, config: Config, run: Path | None) -> None:
        super().__init__()
        self.config, self.run = config, run


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> typing.Callable[..., Caught]:
    """What `m1clip train WORDS` would train, without training it."""

    def stop(
        settings: Settings, run: Path | None = None, name: str | None = None, *more: Any
    ) -> None:
        raise Caught(settings.config, run or (Path("runs") / name if name else None))

    monkeypatch.setattr(m1clip.training.run, "train_config", stop)
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> Caught:
        with pytest.raises(Caught) as caught:
            cli.main(["train", *words])
        return caught.value

    return run


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The error line of a command that fails."""
    with pytest.raises(SystemExit) as exit_:
        cli.main(list(words))
    shown = capsys.readouterr()
    assert exit_.value.code == 2
    assert shown.out == "" or (shown.out.startswith("recipe ") and shown.out.count("\n") == 1)
    assert shown.err.startswith("m1clip: ")
    assert shown.err.count("\n") == 1
    return shown.err


def test_defaults(parse: typing.Callable[..., Caught]) -> None:
    assert parse().config == Config().with_values(recipe="scratch", epochs=10.0), "synthetic"


def test_common_options(parse: typing.Callable[..., Caught]) -> None:
    caught = parse(
        "--model", "original", "--data", "photos", "--minutes", "2.5", "--batch-size", "48", "--device", "cpu",
        "--out", "runs/x", "--seed", "9",
    )  # fmt: skip
    config = caught.config
    assert (config.model.name, config.data.source, config.train.minutes) == (
        "original",
        ("photos",),
        2.5,
    )
    assert (config.train.batch_size, config.train.device, config.seed) == (48, "cpu", 9)
    assert caught.run == Path("runs/x")
    assert parse("--out", "runs/y").run == Path("runs/y")
    assert parse("--epochs", "3").config.train.epochs == 3.0
    assert parse("--steps=5", "--model=ViT-B-32", "--data=photos").config.data.source == ("photos",)


def test_alternative_spellings(
    parse: typing.Callable[..., Caught], monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen = ("--recipe", "frozen")
    assert (
        parse("photos", "--steps", "3", *frozen).config
        == parse("--data", "photos", "--steps", "3", *frozen).config
    )
    assert parse("photos", "more:0.3", "--batch-size", "8", *frozen).config.data.source == (
        "photos",
        "more:0.3",
    )
    assert parse("--batch-size", "8").config == parse("--batch_size=8").config
    assert (
        parse("--weight-decay", "0.2", "--learning_rate=1e-3").config
        == parse("--wd", "0.2", "--lr", "1e-3").config
    )
    assert parse("--batch-size", "auto").config.train.batch_size == "auto"
    assert parse("--steps", "3", "photos", "more", *frozen).config.data.source == ("photos", "more")
    for system, device in (("Linux", "cuda"), ("Darwin", "mps")):
        monkeypatch.setattr("platform.system", lambda system=system: system)
        assert parse("--device", "gpu").config.train.device == device
        assert parse("--device=gpu").config.train.device == device


def test_options_override_the_file_and_the_preset(
    parse: typing.Callable[..., Caught], tmp_path: Path
) -> None:
    (tmp_path / "x.toml").write_text(
        "seed = 3\n[train]\nbatch_size = 32\nepochs = 4\n[data]\nsource = ['old']\n"
    )
    config = parse(
        "--config=x.toml",
        "--batch-size=64",
        "--data=a",
        "--data=b:0.3",
        "--minutes=2",
        "--model=tiny",
    ).config
    assert (config.seed, config.train.batch_size, config.data.source) == (3, 64, ("a", "b:0.3"))
    assert (config.train.minutes, config.train.epochs) == (2.0, None), (
        "a duration replaces one of another kind"
    )
    plain = parse("--preset", "original")
    train = parse("--preset", "original", "--batch-size", "6", "--steps", "3").config.train
    assert (plain.config.train.batch_size, plain.config.train.epochs, plain.run) == (
        12,
        15.0,
        Path("runs/original"),
    )
    assert (train.batch_size, train.epochs, train.steps) == (6, None, 3)


def test_config_file_is_read_unchanged(parse: typing.Callable[..., Caught], tmp_path: Path) -> None:
    train = dataclasses.replace(Config().train, steps=7, eval_every=0, loss="sigmoid")
    data = dataclasses.replace(
        Config().data, source=("a b", "c:0.5"), flip=0.25, caption_column=("x", "y")
    )
    model = dataclasses.replace(
        Config().model, name="original", grad_checkpointing=True, stem="conv"
    )
    config = Config(
        seed=5, train=train, data=data, model=model, transfer=TransferConfig(recipe="scratch")
    )
    (tmp_path / "config.toml").write_text(to_toml(config))
    assert parse("--config", "config.toml").config == config
    assert parse("--config", ".").config == config


def test_options_of_other_tools_get_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    for number, (typed, suggestion) in enumerate(OTHER_TOOLS.items()):
        option = f"{'-' if len(typed) == 1 else '--'}{typed}"
        if number % 10 == 2:  # parsing takes a while
            assert f"Did you mean {suggestion}?" in refused(capsys, "train", option, "8")
        name, *value = (
            suggestion.split()[:2] if suggestion.count(" ") == 1 else suggestion.split()[:1]
        )
        assert name == "--out" or name.removeprefix("--").replace("-", "_") in NAMES
        with pytest.raises(
            UserError, match=f"did you mean '{name.removeprefix('--').replace('-', '_')}'"
        ):
            make_config({typed: 8})
        if name == "--precision":
            make_config({"precision": value[0]})


@pytest.mark.parametrize("name", ["beach.JPG", "captions.csv"])
def test_train_without_data_in_a_folder_of_photos_asks_for_it(
    capsys: pytest.CaptureFixture[str],
    parse: typing.Callable[..., Caught],
    tmp_path: Path,
    name: str,
) -> None:
    (tmp_path / name).touch()  # `parse` works in this folder
    assert "m1clip train . for the images of this folder" in refused(capsys, "train")
    assert parse("synthetic").config.data.source == ("synthetic",)
    assert parse("--preset", "original").config.data.source == ("synthetic",)


def test_full_disk_is_one_line_with_what_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "runs/x/config.toml")

    monkeypatch.setattr("m1clip.training.run.train", fill)
    printed = refused(capsys, "train", "photos")
    assert "runs/x/config.toml: No space left on device; free some space, then" in printed


MISTAKES = [
    (("train", "--bacth-size", "3"), "--batch-size"),
    (("train", "--vision-widht", "3"), "--vision-width"),
    (("train", "--run", "runs/x"), "Did you mean --out?"),
    (("serve", "nowhere", "--port", "0"), "nowhere: no such folder"),
    (("monitor",), "no runs yet in this folder"),
    (("search", "dog", "--index", "nowhere"), "nowhere: no such folder"),
    (("search", "dog", "--index", "."), "not indexed yet; run: m1clip index ."),
    (
        ("train", "a.csv", "--val-data", "b.csv"),
        "--val-data. Put a column split in the table, or name",
    ),
    (("plan", "a.csv", "--test_data=b.csv"), "name the tables train, val and test"),
    (("train", "--lr_rate", "3"), "Did you mean --lr?"),
    (("train", "-lr", "3"), "Did you mean --lr?"),
    (("search", "--folders", "x"), "Did you mean --subfolder?"),
    (("search", "dog", "--limit", "5"), "Unknown option: --limit. Did you mean --count (-k)?"),
    (("search", "dog", "--top-k", "5"), "Did you mean --count (-k)?"),
    (("search", "dog", "-n", "5"), "Did you mean --count (-k)?"),
    (("train", "--batch-size", "many"), "--batch-size"),
    (("train", "--device", "tpu"), "cpu"),
    (("train", "--data", ""), "--data: the value is empty"),
    (("train", "--data="), "--data: the value is empty"),
    (("eval", "runs/x", "--data", ""), "--data: the value is empty"),
    (("train", "--steps", "2.5"), "must be an integer"),
    (("train", "--batch-size=12.7"), "integer"),
    (("train", "--synthetic-images", "1.0"), "must be an integer"),
    (("train", "--resume", "runs/x", "--steps", "9"), "remove --steps"),
    (("train", "--config", "a", "--preset", "demo"), "not both"),
    (("train", "--steps", "3", "photos"), "photos: no such file or folder"),
    (
        ("train", "photos", "--data", "more"),
        "all paths of your images after train, or use --data for all",
    ),
    (("train", "photos", "--steps", "3"), "photos: no such file or folder"),
    (("search", "dog", "--index", ".", "--count", "-1"), "--count"),
    (("data", "make", "x", "--count", "0"), "--count"),
    (("train", "--config", "none.toml"), "none.toml: no such config file"),
    (("train", "--preset", "dmeo"), "did you mean 'demo'"),
    (("train", "--preset", "finetune"), "no such preset: use --init MODEL, or --recipe finetune"),
    (("train", "--preset", "unfreeze", "--steps", "1"), "all: demo, original"),
    (("train", "--minutes", "1", "--epochs", "1"), "--minutes and --epochs"),
    (("train", "--minutes", "inf"), "finite"),
    (("train", "--steps", "-3"), "above 0"),
    (("train", "--seed", "-1"), "seed"),
    (("train", "--resume", "nowhere"), "nowhere: no such file or folder"),
    (("train", "--model", "tinny", "--steps", "3"), "did you mean 'tiny'"),
    (("train", "--device", "cuda", "--steps", "3"), "not available on this machine"),
    (("trian",), "train"),
    (("eval", "nowhere"), "nowhere"),
    (("data", "make"), "FOLDER"),
    (("data", "make", "x", "--seed", "1.5"), "--seed 1.5: expected an integer"),
    (("serve", ".", "--port", "1.5"), "--port 1.5: expected an integer"),
    (("serve", ".", "--port", "-1"), "Must be >= 0"),
    (("monitor", "--port", "65536"), "Must be <= 65535"),
    (("train", "--plan", "3"), "Unknown option: --plan.\n"),
    (
        ("demo", "--lr", "0.001"),
        "Unknown option: --lr. m1clip train --preset demo --lr VALUE changes it.\n",
    ),
    (("demo", "--batch-size=8"), "m1clip train --preset demo --batch-size VALUE changes it.\n"),
    (("demo", "--lrr", "1"), "Unknown option: --lrr.\n"),
]


@pytest.mark.parametrize(
    ("words", "message"), MISTAKES, ids=[" ".join(words) for words, _ in MISTAKES]
)
def test_user_errors_are_one_line_with_exit_code_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    words: tuple[str, ...], message: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert message in refused(capsys, *words)
    assert list(tmp_path.iterdir()) == []  # nothing is left behind


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("batch_size", "many", "many"),
        ("steps", "2.5", 2.5),
        ("lr", "fast", "fast"),
        ("seed", "-1", -1),
        ("device", "tpu", "tpu"),
        ("optimizer", "sgd", "sgd"),
        ("save_every", "2 weeks", "2 weeks"),
        ("memory", "8", "8"),
    ],
)
def test_command_python_and_toml_report_a_mistake_in_the_same_words(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, text: str, value: Any
) -> None:
    printed = refused(capsys, "train", f"--{name.replace('_', '-')}={text}")
    with pytest.raises(UserError) as from_python:
        make_config({name: value})
    assert printed == f"m1clip: {from_python.value}\n"
    section, key = NAMES[name]
    path = tmp_path / "x.toml"
    path.write_text(
        f"[{section}]\n{key} = {json.dumps(value)}\n" if section else f"{key} = {value}\n"
    )
    with pytest.raises(UserError) as from_toml:
        make_config({}, path)
    assert str(from_toml.value).startswith(f"{path}: ")
    assert str(from_toml.value).endswith(str(from_python.value).partition(" ")[2])


def test_debug_shows_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["train", "--seed", "-1", "--debug"])
    assert exit_.value.code == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("words", [("--help",), ("--version",), ("train", "--help-all")])
def test_help_and_version_import_nothing_heavy(tmp_path: Path, words: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "m1clip", *words],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    imported = {
        line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()
    }
    assert "cyclopts" in imported
    assert not imported & set(HEAVY)
    assert (
        (done.stdout.strip() == __version__)
        if words == ("--version",)
        else ("Usage: m1clip" in done.stdout)
    )


def test_help_lists_every_option(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Cyclopts keeps the console of the first --help.
    monkeypatch.setattr(app, "_console", Console(width=200))
    with pytest.raises(SystemExit):
        cli.main(["train", "--help-all"])
    shown = capsys.readouterr().out
    for name in (*(set(NAMES) - {"plan"}), "out", "resume", "config", "preset", "background"):
        assert f"--{name.replace('_', '-')} " in shown


@pytest.mark.slow
def test_interrupt_while_importing_prints_no_traceback(tmp_path: Path) -> None:
    slow = "import os, signal; os.kill(os.getpid(), signal.SIGINT)\n"  # cyclopts is the first import of the command
    (tmp_path / "cyclopts.py").write_text(slow)
    # The current folder comes first on the path.
    ended = subprocess.run(
        [sys.executable, "-m", "m1clip"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (130, b"")


def test_index_report_counts_are_grammatical() -> None:
    arguments = (Path("photos/.m1clip-index"), Path("photos"), "general")
    lines = _report_lines(
        Report(*arguments, hidden=1, links=1, other=1, problems=[("a.jpg", "damaged")]), None
    )
    assert lines[3] == "skipped    1 hidden, 1 link, 1 other file, 1 file that cannot be used"
    lines = _report_lines(Report(*arguments, links=2), None)
    assert lines[3] == "skipped    0 hidden, 2 links, 0 other files, 0 files that cannot be used"


def test_index_report_shortens_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    folder = Path("/home/ada/Pictures")
    lines = _report_lines(Report(folder / ".m1clip-index", folder, "general"), None)
    assert lines[0] == "index      ~/Pictures/.m1clip-index"


def test_index_names_its_model_and_the_newest_run_if_that_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    photos = make_photos(tmp_path / "photos", 2)
    model = save_model(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))

    def index(*words: str) -> str:
        with pytest.raises(SystemExit, match="0"):
            cli.main(["index", str(photos), *words])
        return capsys.readouterr().out

    assert "\nmodel      model\n" in index("--model", str(model))
    assert "note" not in index()
    run = tmp_path / "runs" / "labels"
    run.mkdir(parents=True)
    (run / "run.jsonl").write_text('{"kind": "end", "time": 1}\n', encoding="utf-8")
    save_model(run / "best", embed_dim=8)
    first = index()
    assert "\nmodel      model\n" in first  # searches change only if the user says so
    command = shlex.join(["m1clip", "index", str(photos), "--model", "runs/labels"])
    assert f"the newest run is runs/labels; to search with it: {command}\n" in first
    second = index("--model", "runs/labels")
    assert "\nmodel      runs/labels\n" in second
    assert "note" not in index()
    photos = make_photos(tmp_path / "others", 2)
    command = shlex.join(["m1clip", "index", str(photos), "--model", "general"])
    reason = "runs/labels was chosen as the newest finished run; for the model in the box: "
    assert f"note       {reason}{command}\n" in index()
