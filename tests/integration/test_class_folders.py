"""The metric that selects the best model has one name and value in the log, terminal, monitor, report and page."""

import random
import re
from pathlib import Path

import pytest
import torch
from PIL import Image
from small_run import small_config
from tower_run import frozen_config, patch_towers

from m1clip import console
from m1clip.evaluation.evaluate import evaluate
from m1clip.inference import load
from m1clip.monitor.history import History
from m1clip.monitor.report import write_report
from m1clip.monitor.status import as_table, list_runs
from m1clip.monitor.terminal import once
from m1clip.runlog import read_log
from m1clip.training.run import train_config
from m1clip.web.server import Store, key_of

NO_COUNTS = {"data.synthetic_images": None, "data.captions_per_step": None}
COLORS = {
    "red": (200, 30, 30),
    "green": (30, 200, 30),
    "blue": (30, 30, 200),
    "gray": (110, 110, 110),
}


def class_folders(folder: Path) -> Path:
    """train, val and test with a folder of images for each color.

    No gray image is in val or test.
    """
    draw = random.Random(0)
    for split, count in (("train", 12), ("val", 5), ("test", 4)):
        for name, color in COLORS.items():
            if name == "gray" and split != "train":
                continue
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                noisy_color = tuple(value + draw.randrange(-30, 30) for value in color)
                Image.new("RGB", (32, 32), noisy_color).save(
                    folder / split / name / f"{number}.png"
                )
    return folder


@pytest.fixture(autouse=True)
def _every_progress_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("m1clip.training.logger.STEP_SECONDS", -1.0)


def trained(folder: Path, changes: dict[str, object]) -> tuple[Path, str]:
    """The run, and what training printed, with the final table."""
    small = {"train.steps": 12, "train.eval_every": 3, **changes}
    with console.capture() as output:
        result = train_config(small_config(small), folder)
        console.print(str(result.scores))
    return result.path, output.getvalue()


def test_class_folders_are_selected_by_top1_accuracy(tmp_path: Path) -> None:
    data = class_folders(tmp_path / "data")
    run, printed = trained(tmp_path / "run", {"data.source": [str(data)], **NO_COUNTS})
    log = list(read_log(run))
    evaluations = {line["step"]: line["top1_accuracy"] for line in log if line["kind"] == "eval"}
    end = log[-1]
    assert evaluations[end["best_step"]] == max(evaluations.values()) > 1 / 4
    assert_all_classes_are_candidates(run)
    assert re.search(r"^class +top-1 +95% interval +images$", printed, re.MULTILINE)
    assert all(
        re.search(rf"^{name} +[\d.]+% .* 4$", printed, re.MULTILINE)
        for name in ("red", "green", "blue")
    )
    bundle = load(run)
    paths = sorted((data / "test").rglob("*.png"))
    vectors = bundle.class_vectors(list(COLORS), ["a photo of a {}."])
    predicted = (bundle.encode_image([bundle.square(path) for path in paths]) @ vectors.T).argmax(
        dim=1
    )
    right = torch.tensor([list(COLORS).index(path.parent.name) for path in paths])
    assert end["top1_accuracy"] == pytest.approx(float((predicted == right).float().mean()))
    assert_one_name(run, printed, "top-1 accuracy", max(evaluations.values()))


def test_class_folders_with_frozen_towers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patch_towers(monkeypatch)
    data = {"data.source": [str(class_folders(tmp_path / "data"))], **NO_COUNTS}
    run = train_config(frozen_config(tmp_path, **data), tmp_path / "run").path
    assert_all_classes_are_candidates(run)


def assert_all_classes_are_candidates(run: Path) -> None:
    """At each evaluation, at the end and in `m1clip eval`, though no gray image is in val or test."""
    records = [record for record in read_log(run) if record["kind"] in ("eval", "end")]
    assert len(records) >= 2
    assert [record["top1_accuracy/chance"] for record in records] == [0.25] * len(records)
    assert all(record["image_to_text/recall@1"] >= record["top1_accuracy"] for record in records)
    again = evaluate(run, [], device="cpu")
    assert (again["top1_accuracy"].chance, again["top1_accuracy"].value) == (
        0.25,
        records[-1]["top1_accuracy"],
    )


def test_captions_are_selected_by_mean_recall(tmp_path: Path) -> None:
    run, printed = trained(
        tmp_path / "run", {"train.patience": 1, "train.steps": 60, "optim.lr": 1.0}
    )
    evaluations = [line["mean_recall"] for line in read_log(run) if line["kind"] == "eval"]
    assert re.search(r"stopped +after 1 evaluations without improvement of mean recall", printed)
    assert "early stop at step" in once(run, (120, 50))
    assert_one_name(run, printed, "mean recall", max(evaluations))


def assert_one_name(run: Path, printed: str, label: str, best: float) -> None:
    """The same label and value in the terminal, the monitor, the list of runs, the report and the page."""
    value = f"{100 * best:.1f}%"
    last = next(read for read in reversed(list(read_log(run))) if read["kind"] == "eval")
    history = History(run).poll()
    now = f"{label} {100 * last[history.metric]:.1f}%"
    assert re.search(
        rf"^validation step [\d,]+: {label} {value} .*best so far", printed, re.MULTILINE
    )
    assert f"best       step {history.end['best_step']:,}: validation {label} {value}" in printed
    assert re.search(rf"^step .*  {label} [\d.]+%  ", printed, re.MULTILINE), "the live line"
    assert re.search(
        rf"^ *{label} +{100 * history.end[history.metric]:.1f}%", printed, re.MULTILINE
    ), "final table"
    monitor = once(run, (160, 50))
    assert f"{now} [" in monitor
    assert f"evaluated at step {last['step']:,}: {now}" in monitor
    assert f"{label} {value}" in as_table(list_runs(run.parent), run.parent)
    assert label in write_report([run], run.parent / "report.html").read_text()
    (summary,) = (
        listed for listed in Store([run.parent]).update({})["runs"] if listed["id"] == key_of(run)
    )
    assert (summary["metric"], summary["best"]) == (label, best)
