"""The public API of the package."""

import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
from photos import make_photos, save_model
from small_run import losses_of, run_small, small_config
from tiny_model import tiny_model

import m1clip
from m1clip import console
from m1clip.errors import UserError
from m1clip.training.run import train_config


def test_public_names_never_change_type() -> None:
    first = m1clip.train
    assert callable(first)
    importlib.import_module("m1clip.training.run")
    assert m1clip.train is first
    assert m1clip.load is m1clip.load


def test_all_public_names_exist_and_are_in_the_docs() -> None:
    docs = (Path(m1clip.__file__).parent.parent / "docs" / "python.md").read_text(encoding="utf-8")
    for name in m1clip.__all__:
        assert getattr(m1clip, name)
        assert name.startswith("_") or f"`{name}`" in docs


def test_export_is_callable_before_and_after_its_package_is_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_model("char", ["a dog"]).save(tmp_path / "model")
    first = m1clip.export
    importlib.import_module("m1clip.export.layouts")
    assert m1clip.export is first
    assert list(inspect.signature(m1clip.export).parameters)[:3] == ["model", "to", "out"]
    folder = m1clip.export(str(tmp_path / "model"), to="safetensors")
    assert folder == tmp_path / "model-safetensors"
    assert capsys.readouterr().out == "", "only the command prints"
    assert repr(m1clip.load(folder)) == repr(m1clip.load(tmp_path / "model"))
    with pytest.raises(UserError, match="already exists"):
        m1clip.export(tmp_path / "model", to="safetensors", out=folder)
    with pytest.raises(UserError, match=r"to='onx': unknown format: did you mean 'onnx'\?"):
        m1clip.export(folder, to="onx")  # type: ignore[arg-type]
    with pytest.raises(
        UserError, match="export takes the path of a run or a model folder, not Model"
    ):
        m1clip.export(m1clip.load(folder))  # type: ignore[arg-type]


def test_index_is_built_and_updated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    photos = make_photos(tmp_path / "photos", 3)
    counted: list[tuple[int, int]] = []
    with console.on_progress(lambda *count: counted.append(count)):
        index = m1clip.Index.build(photos, save_model(tmp_path / "model"))
    assert (len(index), counted[-1]) == (3, (3, 3))
    make_photos(photos / "more", 5)
    report = index.update()
    assert (report.added, len(index)) == (2, 8)
    assert index.search("a dog").searched >= 5
    assert index.update().added == 0


def test_resume_continues_a_run_from_python(tmp_path: Path) -> None:
    def stop(record: dict[str, Any]) -> None:
        if record["kind"] == "step" and record["step"] == 4:
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        train_config(small_config({"train.save_every": 2}), tmp_path / "run", on_log=stop)
    steps_logged: list[int] = []
    run = m1clip.resume(
        tmp_path / "run",
        on_log=lambda record: steps_logged.append(record.get("step", -1)),
        device="cpu",
    )
    assert run.path == tmp_path / "run"
    assert steps_logged[0] == 2
    assert losses_of(run.path)[-1] == losses_of(run_small(tmp_path / "whole").path)[-1]
    with pytest.raises(UserError, match="--device"):
        m1clip.resume(tmp_path / "run", device="tpu")
    with pytest.raises(UserError, match="nowhere: no such file or folder"):
        m1clip.resume(tmp_path / "nowhere")
