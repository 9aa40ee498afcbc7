"""MISSION 9: a checkpoint every N epochs."""

import pytest
from small_run import finished_run, small_config

from m1clip.errors import UserError
from m1clip.formatting import save_interval
from m1clip.runlog import read_log


def test_checkpoints_every_epochs() -> None:
    """An epoch of the small run has four steps; the last step is always saved."""
    run = finished_run({"train.save_every": "1.5 epochs", "train.steps": 14})
    saved = [line["step"] for line in read_log(run) if line["kind"] == "checkpoint"]
    assert saved == [6, 12, 14]
    for text in ("1.5e", "1.5ep", "1.5 epochs"):
        assert save_interval(text, "--save-every").epochs == 1.5
    with pytest.raises(UserError, match="or epochs such as 2e"):
        small_config({"train.save_every": "two epochs"})
