"""Automatic choices: device and precision by measurement, batch sizes by memory."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from machines import H200, M1, M4, TURING, XEON
from small_run import small_config

from m1clip.errors import UserError
from m1clip.hardware.choices import ROUNDS
from m1clip.hardware.device import Device
from m1clip.hardware.machine_info import MachineInfo, read_machine_info
from m1clip.model.presets import clip_config, with_fields
from m1clip.training import device_choice
from m1clip.training.device_choice import (
    Candidate,
    Choice,
    Measured,
    candidates,
    choose,
    drop_contradicted,
)
from m1clip.training.transfer import ModelInit

SHAPE = clip_config(small_config().model, vocab_size=64)
START = ModelInit(SHAPE)


@pytest.mark.parametrize(
    ("facts", "device", "precision", "options"),
    [
        (H200, "auto", "auto", ["cuda bf16", "cpu fp32", "cpu bf16"]),
        (H200, "cuda", "auto", ["cuda bf16"]),
        (H200, "cpu", "fp32", ["cpu fp32"]),
        (H200, "auto", "fp32", ["cuda fp32", "cpu fp32"]),
        (TURING, "auto", "bf16", ["cpu bf16"]),
        (M1, "auto", "auto", ["mps fp32", "cpu fp32", "cpu bf16"]),
        (M4, "mps", "auto", ["mps fp32", "mps bf16"]),
        (H200, "cuda+cpu", "auto", ["cuda+cpu fp32", "cuda+cpu bf16"]),
        (M1, "mps+cpu", "fp32", ["mps+cpu fp32"]),
    ],
)
def test_candidates(facts: MachineInfo, device: str, precision: str, options: list[str]) -> None:
    assert [" ".join(option) for option in candidates(device, precision, facts)] == options


def auto(**changes: Any) -> Any:
    return small_config({"train.device": "auto", "train.precision": "auto", **changes})


TABLE = {"cuda bf16": 0.1, "cpu fp32": 3.0, "cpu bf16": 2.0}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replaces the measurement by a table of seconds, 0 for a wrong gradient.

    Returns it, the calls and the load.
    """
    table, calls, load = dict(TABLE), list[int](), {"others": 0.0}

    def measure(config: Any, start: Any, facts: Any, options: Any, tokens: int, batch: int) -> Any:
        calls.append(batch)
        seconds = {option: table[" ".join(option)] for option in options}
        measured_candidates = [
            Candidate(
                *option,
                (duration,) * ROUNDS if duration else (),
                0.0,
                "" if duration else "gradients 90% different",
            )
            for option, duration in seconds.items()
        ]
        return Measured(tuple(measured_candidates), batch, load["others"])

    monkeypatch.setattr(device_choice, "measure", measure)
    return table, calls, load


def test_fastest_candidate_is_chosen_and_kept(tmp_path: Path, measured: Any) -> None:
    first = choose(auto(), START, H200, 16, tmp_path)
    assert (first.device, first.precision, first.cached) == ("cuda", "bf16", False)
    assert (
        first.why == "30.0x as fast as cpu fp32, 20.0x as fast as cpu bf16; measured with batch 8"
    )
    again = choose(auto(), START, H200, 16, tmp_path)
    assert (again.device, again.cached) == ("cuda", True)
    assert again.why.endswith("in an earlier run")
    assert len(measured[1]) == 1
    for path in tmp_path.iterdir():
        path.write_text('{"choice": {"device": "cuda"}}')  # a damaged file is measured again
    choose(auto(), START, H200, 16, tmp_path)
    assert len(measured[1]) == 2
    assert choose(auto(**{"train.device": "cuda"}), START, H200, 16, tmp_path) == Choice(
        "cuda", "bf16"
    )
    assert len(measured[1]) == 2, "a single candidate is not measured"


def test_choice_beside_other_programs_is_not_kept(tmp_path: Path, measured: Any) -> None:
    table, calls, load = measured
    table["cpu fp32"] = 0.01
    load["others"] = 0.5
    busy = choose(auto(), START, H200, 16, tmp_path)
    assert (busy.device, busy.kept_at) == ("cpu", "")
    assert busy.why.endswith("beside other programs: not kept")
    assert not list(tmp_path.iterdir())
    table["cpu fp32"], load["others"] = 3.0, 0.0
    assert choose(auto(), START, H200, 16, tmp_path).device == "cuda"
    assert len(calls) == 2


def test_default_that_was_not_the_fastest_is_described_in_plain_words() -> None:
    candidates = (
        device_choice.Candidate("cpu", "bf16", (1.2, 1.2, 1.2)),
        device_choice.Candidate("cpu", "fp32", (1.0, 1.0, 1.3)),
    )
    assert Choice("cpu", "bf16", candidates, 8).why == (
        "the default of this hardware, cpu fp32 measured 1.2x as fast, but not in nearly all rounds;"
        " measured with batch 8 beside other programs: not kept"
    )


def test_default_of_the_hardware() -> None:
    with_bf16 = dataclasses.replace(XEON, cpu_bf16=True)
    both: list[Any] = [("cpu", "fp32"), ("cpu", "bf16")]
    assert device_choice.default_option(both, with_bf16) == ("cpu", "bf16")
    assert device_choice.default_option(both, XEON) == ("cpu", "fp32")
    assert device_choice.default_option([("cuda", "bf16"), *both], H200) == ("cuda", "bf16")
    assert device_choice.default_option([("mps", "fp32"), *both], M1) == ("mps", "fp32")
    assert device_choice.default_option([("cpu", "bf16")], XEON) == ("cpu", "bf16"), "asked for"


def test_kept_choice_that_a_run_contradicts_is_dropped(tmp_path: Path, measured: Any) -> None:
    choice = choose(auto(), START, H200, 16, tmp_path)
    values = dataclasses.asdict(choice)
    per_image = 2.0 / choice.batch  # of the CPU in bf16, the fastest that was rejected
    assert drop_contradicted(values, 1.2 * per_image) == ""
    assert Path(choice.kept_at).exists()
    text = drop_contradicted(values, 1.3 * per_image)
    assert (
        "slower than those that were measured with cpu bf16; the kept choice of cuda bf16 is"
        " dropped" in text
    )
    assert not Path(choice.kept_at).exists()
    assert drop_contradicted(dataclasses.asdict(Choice("cpu", "fp32")), 9.0) == "", (
        "nothing was measured"
    )


@pytest.mark.parametrize(
    "change", [{"facts": dataclasses.replace(H200, torch="9.9")},
               {"model_init": ModelInit(with_fields(SHAPE, embed_dim=64))},
               {"config": auto(**{"optim.optimizer": "adamw"})}, {"tokens": 24}]
)  # fmt: skip
def test_changed_machine_model_or_version_is_measured_again(
    tmp_path: Path, measured: Any, change: dict[str, Any]
) -> None:
    for changes_ in ({}, change):
        facts, start, config = (
            changes_.get("facts", H200),
            changes_.get("model_init", START),
            changes_.get("config", auto()),
        )
        choose(config, start, facts, changes_.get("tokens", 16), tmp_path)
    assert len(measured[1]) == 2


def test_device_with_wrong_gradients_is_rejected(tmp_path: Path, measured: Any) -> None:
    measured[0]["cuda bf16"] = 0.0
    choice = choose(auto(), START, H200, 16, tmp_path)
    assert (choice.device, choice.precision) == ("cpu", "bf16")
    assert "cuda bf16 rejected: gradients 90% different" in choice.why
    measured[0].update(dict.fromkeys(TABLE, 0.0))
    with pytest.raises(UserError, match="no device passed its test"):
        choose(auto(), START, H200, 24, tmp_path / "other")


def test_cpu_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resets: list[str] = []
    monkeypatch.setattr(Device, "reset_peak", lambda self: resets.append(self.kind) or True)
    monkeypatch.setattr(device_choice, "MEASURED_SECONDS", 1000.0)  # also on a busy machine
    facts = dataclasses.replace(read_machine_info(), cuda=None, mps=False)
    choice = choose(auto(), START, facts, 16, tmp_path)
    assert {(c.device, c.precision, c.rejected) for c in choice.candidates} == {
        ("cpu", "fp32", ""),
        ("cpu", "bf16", ""),
    }
    assert all(
        (c.gradient_difference or 0.0) < 0.1 and min(c.seconds) > 0 for c in choice.candidates
    )
    assert resets == ["cpu"], "the run reports its own peak"
    powers = (torch.full((4,), 10.0**n) for n in itertools.count())
    monkeypatch.setattr(device_choice, "gradient", lambda *_: (torch.ones(()), next(powers)))
    with pytest.raises(UserError, match="different from the CPU's"):
        choose(auto(), START, facts, 24, tmp_path)
    monkeypatch.setattr(device_choice, "MEASURED_SECONDS", 0.0)
    hurried = choose(auto(), START, facts, 32, tmp_path)
    assert hurried.why == ""
    assert (hurried.device, hurried.precision) == device_choice.default_option(
        [("cpu", "fp32"), ("cpu", "bf16")], facts
    )
