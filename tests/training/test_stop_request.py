"""A signal between two looks at it: the run stops at a step that is saved, never at one that is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_run import small_config

from m1clip.runlog import read_log
from m1clip.training import loop
from m1clip.training.checkpoint_files import verify
from m1clip.training.process import Stopped
from m1clip.training.run import train_config


def test_a_signal_after_the_look_stops_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes while the saver is being asked whether a checkpoint has become whole."""
    real = loop.TrainLoop._between_steps

    def between_steps(self: Any) -> bool:
        poll = self.writer.poll

        def late() -> None:
            poll()
            if self.state.step == 3:
                self.stop.signal = 15

        monkeypatch.setattr(self.writer, "poll", late)
        return real(self)

    monkeypatch.setattr(loop.TrainLoop, "_between_steps", between_steps)
    config = small_config({"train.steps": 8, "train.save_every": 8, "train.eval_every": 8})
    with pytest.raises(Stopped):
        train_config(config, tmp_path / "run")
    (event,) = [line for line in read_log(tmp_path / "run") if line["kind"] == "event"]
    assert event["step"] == 4
    assert verify(tmp_path / "run" / "checkpoints" / "step-000004") == ""
