"""Examples that a run leaves for its pages: how many are kept."""

from __future__ import annotations

import json
from pathlib import Path

from m1clip.evaluation.snapshot import MAX_SNAPSHOTS, thin_out


def test_snapshots_are_thinned_out(tmp_path: Path) -> None:
    (tmp_path / "thumbnails").mkdir()
    for step in range(1, 200):
        content = {"matrix": {"images": [step]}, "queries": [], "confusions": []}
        (tmp_path / f"step-{step:08d}.json").write_text(json.dumps(content))
        (tmp_path / "thumbnails" / f"{step}.jpg").touch()
        thin_out(tmp_path, step)
    kept = sorted(int(path.stem[5:]) for path in tmp_path.glob("*.json"))
    assert len(kept) <= MAX_SNAPSHOTS
    assert {1, 199} <= set(kept)  # the first and the last
    assert {int(path.stem) for path in (tmp_path / "thumbnails").iterdir()} <= set(range(1, 200))
    assert len(list((tmp_path / "thumbnails").iterdir())) <= 2 * MAX_SNAPSHOTS
    thin_out(tmp_path, 100)  # continued from a checkpoint at 100
    assert max(int(path.stem[5:]) for path in tmp_path.glob("*.json")) <= 100
