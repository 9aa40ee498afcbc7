"""7: one loop for every device.

Auto chooses with a reason, and a named device that is missing is an error.
"""

import machines
import pytest
from small_run import exit_code, finished_run

from m1clip.errors import UserError
from m1clip.hardware.device import available, choose_device
from m1clip.hardware.machine_info import read_machine_info


def test_auto_follows_the_machine() -> None:
    assert choose_device("auto", machines.H200) == "cuda"
    assert choose_device("auto", machines.M1) == "mps"
    assert choose_device("auto", machines.XEON) == "cpu"
    with pytest.raises(UserError, match=r"--device cuda: not available.*found: cpu"):
        choose_device("cuda", machines.XEON)


def test_missing_device_stops_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    missing = next(kind for kind in ("cuda", "mps") if kind not in available(read_machine_info()))
    assert exit_code("train", "--device", missing, "--steps", "1") == 2
    assert f"--device {missing}: not available" in capsys.readouterr().err


def test_run_records_its_device() -> None:
    assert 'device = "cpu"' in (finished_run() / "config.toml").read_text()
