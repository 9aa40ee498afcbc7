"""Snapshots of a run are thinned out."""

from __future__ import annotations

from pathlib import Path

from m1clip.evaluation.snapshot import MAX_SNAPSHOTS, thin_out


def test_snapshots_are_thinned_out(tmp_path: Path) -> None:
    for step in range(1, 200):
        (tmp_path / f"step-{step:08d}.json").touch()
        thin_out(tmp_path, step)
    kept = sorted(int(path.stem[5:]) for path in tmp_path.glob("*.json"))
    assert len(kept) <= MAX_SNAPSHOTS
    assert {1, 199} <= set(kept)  # the first and the last
    thin_out(tmp_path, 100)  # resumed from a checkpoint at 100
    assert max(int(path.stem[5:]) for path in tmp_path.glob("*.json")) <= 100
