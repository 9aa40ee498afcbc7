"""10: a monitor in a second process shows progress, curves, memory and cores of a run."""

import shutil
from pathlib import Path

from small_run import finished_run, losses_of

from m1clip.monitor.status import as_table, list_runs
from m1clip.monitor.terminal import once

WINDOW = (120, 40)


def test_screen_shows_the_figures_of_its_run() -> None:
    runs = [finished_run(), finished_run({"train.steps": 3})]
    screens = [once(run, WINDOW) for run in runs]
    for run, screen, steps in zip(runs, screens, (10, 3), strict=True):
        assert f"step {steps} of {steps}" in screen
        assert f"loss {losses_of(run)[-1]:.3g}"[:8] in screen
        assert "memory" in screen
        assert "cores" in screen


def test_list_of_runs_shows_their_state(tmp_path: Path) -> None:
    for name, steps in (("short", 3), ("long", 10)):
        run = finished_run({"train.steps": steps} if steps == 3 else None)
        # Without the lock of this process, which is still alive.
        shutil.copytree(run, tmp_path / name, ignore=shutil.ignore_patterns("*lock*"))
    rows = {Path(row["run"]).name: row for row in list_runs(tmp_path)}
    assert {row["state"] for row in rows.values()} == {"finished"}
    assert (rows["short"]["step"], rows["long"]["step"]) == (3, 10)
    assert "finished" in as_table(list(rows.values()), tmp_path)
