"""The doctor's checks as functions of a machine: an M1, an M4, an AMX Xeon, an H200, and this one."""

import contextlib
import dataclasses
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import machines
import pytest
import torch
import torch.nn.functional as F

from m1clip.bench import doctor as module
from m1clip.bench.doctor import Finding, Machine, check, check_known_errors, doctor_text, try_kernel
from m1clip.bench.known_errors import KNOWN_ERRORS, WRONG_RESULT_CODE, find_errors
from m1clip.cli.machine import doctor
from m1clip.formatting import plural
from m1clip.hardware import choices
from m1clip.hardware.device import Device
from m1clip.hardware.machine_info import MachineInfo, read_machine_info

GIB = 2**30


def healthy(facts: MachineInfo, **changes: Any) -> Machine:
    kinds = [
        kind for kind, there in (("cuda", facts.cuda), ("mps", facts.mps), ("cpu", True)) if there
    ]
    base = Machine(
        facts=facts,
        kernel_failures=dict.fromkeys(kinds, ""),
        gemm_flops={kind: {"fp32": 1e12, "bf16": 2e12} for kind in kinds},
        usable_cpus=facts.cores,
        memory_available=facts.memory_bytes * 3 // 4,
        disk_free=100 * GIB,
        meters=dict.fromkeys(kinds),
    )
    return dataclasses.replace(base, **changes)


M1 = healthy(machines.M1, on_battery=False)
M4 = healthy(machines.M4, on_battery=False, meters={"mps": "zeus-apple-silicon"})
AMX = healthy(machines.XEON, shared_memory_free=8 * GIB)
H200 = healthy(
    machines.H200, nvidia_driver=True, torch_cuda_build="13.0", shared_memory_free=8 * GIB
)


def by_name(machine: Machine) -> dict[str, Finding]:
    return {finding.name: finding for finding in check(machine)}


@pytest.mark.parametrize("machine", [M1, M4, AMX, H200], ids=["M1", "M4", "AMX Xeon", "H200"])
def test_healthy_machine_has_no_warning(machine: Machine) -> None:
    findings = check(machine)
    assert {finding.level for finding in findings} == {"ok"}
    names = [finding.name for finding in findings]
    assert len(names) == len(set(names))
    kinds = set(machine.kernel_failures)
    assert kinds <= set(names)


@pytest.mark.parametrize(
    ("base", "changes", "name", "level", "hint"),
    [
        (M1, {"rosetta": True}, "rosetta", "problem", "arm64 Python"),
        (M1, {"on_battery": True}, "power", "warning", "plug in"),
        (M1, {"low_power": True}, "power", "warning", "turn it off"),
        (
            M4,
            {"variables": {"PYTORCH_ENABLE_MPS_FALLBACK": "1"}},
            "environment",
            "warning",
            "unset",
        ),
        (
            AMX,
            {"variables": {"OMP_NUM_THREADS": "64"}},
            "environment",
            "warning",
            "unset OMP_NUM_THREADS",
        ),
        (AMX, {"cpu_quota": 2.0}, "threads", "warning", "--threads 2"),
        (AMX, {"memory_available": GIB // 2}, "memory", "problem", "close other programs"),
        (AMX, {"memory_available": 6 * GIB}, "memory", "warning", "--memory"),
        (AMX, {"disk_free": GIB // 2}, "disk", "problem", "free some space"),
        (AMX, {"disk_free": 3 * GIB}, "disk", "warning", "--save-total-limit"),
        (AMX, {"shared_memory_free": 64 * 2**20}, "shared memory", "warning", "--shm-size"),
        (AMX, {"load": 12.0}, "load", "warning", "stop other programs"),
        (AMX, {"nvidia_driver": True}, "torch", "problem", "CUDA build"),
        (
            H200,
            {"kernel_failures": {"cuda": "no kernel image", "cpu": ""}},
            "cuda",
            "problem",
            "--device cpu",
        ),
    ],
)
def test_defect_is_reported_with_its_remedy(
    base: Machine, changes: dict[str, Any], name: str, level: str, hint: str
) -> None:
    finding = by_name(dataclasses.replace(base, **changes))[name]
    assert finding.level == level
    assert hint in finding.hint


def test_doctor_on_this_machine() -> None:
    machine = module.read_machine()
    assert machine.kernel_failures["cpu"] == ""
    assert machine.gemm_flops["cpu"]["fp32"] > 0
    text = doctor_text(check(machine))
    assert text.splitlines()[0].startswith("ok       python: ")
    counts = Counter(line.split()[0] for line in text.splitlines()[:-1])
    assert (
        text.splitlines()[-1]
        == f"{plural(counts['problem'], 'problem')}, {plural(counts['warning'], 'warning')}"
    )


def test_counts_of_the_doctor_are_grammatical() -> None:
    findings = [Finding("warning", "disk", "text"), Finding("ok", "python", "text")]
    assert doctor_text(findings).splitlines()[-1] == "0 problems, 1 warning"
    assert doctor_text([*findings, *findings]).splitlines()[-1] == "0 problems, 2 warnings"


@pytest.mark.parametrize(
    ("error", "reported"), [(0.0, ""), (1e-5, ""), (0.02, "its gradient differs from the CPU's")]
)
def test_wrong_kernel_is_detected(
    error: float, reported: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    grad, calls = torch.autograd.grad, list[bool]()

    def device_grad(*arguments: Any) -> tuple[torch.Tensor, ...]:
        """The gradient with an error in one number.

        Only in the first call, which is that of the device.
        """
        (gradients,) = grad(*arguments)
        if not calls:
            gradients[5, 7] *= 1 + error
        calls.append(True)
        return (gradients,)

    monkeypatch.setattr(torch.autograd, "grad", device_grad)
    assert try_kernel(Device("cpu", read_machine_info())) == reported
    assert len(calls) == 2


def test_kernel_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("no kernel image\nis available")

    monkeypatch.setattr(torch.autograd, "grad", fail)
    assert try_kernel(Device("cpu", read_machine_info())) == "no kernel image"


def test_known_errors_are_all_right_on_this_machine() -> None:
    for kind in ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]:
        errors = find_errors(kind)
        assert len(errors) == len(KNOWN_ERRORS)
        assert set(errors.values()) == {""}
        (finding,) = check_known_errors(kind, errors)
        assert finding.level == "ok"


def test_known_errors_are_found_where_kernels_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attention that ignores its mask, and a linear layer that drops its bias."""
    attention, linear = F.scaled_dot_product_attention, F.linear
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda q, k, v, is_causal: attention(q, k, v)
    )
    calls: list[bool] = []

    def without_bias(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        calls.append(bias is not None)  # the device's call comes first, then the expected result
        return linear(x, weight, None if sum(calls) % 2 else bias)

    monkeypatch.setattr(F, "linear", without_bias)
    wrong_kernels = {name.split(",")[0] for name, outcome in find_errors("cpu").items() if outcome}
    assert "pytorch#195910" in wrong_kernels
    assert wrong_kernels & {"pytorch#189495", "pytorch#188438"}


ABORTING = [number for number, error in enumerate(KNOWN_ERRORS) if error.aborts]


@pytest.mark.parametrize(
    ("ending", "reported"),
    [
        ("exit 0", ""),
        (f"exit {WRONG_RESULT_CODE}", "wrong"),
        ("kill -ABRT $$", "the process ends"),
        ("exit 1", "the process ends"),
    ],
)
def test_error_that_ends_the_process_is_reported(
    ending: str, reported: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real process takes the place of Python.

    It ends in this way if it was asked for the right error.
    """
    (number,) = ABORTING
    program = tmp_path / "python"
    program.write_text(
        f'#!/bin/sh\n[ "$*" = "-m m1clip.bench.known_errors mps {number}" ] || exit 0\n{ending}\n'
    )
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    assert [*find_errors("mps").values()][number] == reported


def test_reproduction_in_a_process_of_its_own_has_its_exit_code() -> None:
    (number,) = ABORTING
    command = [sys.executable, "-m", "m1clip.bench.known_errors", "cpu", str(number)]
    assert subprocess.run(command, check=False, timeout=600).returncode == 0


def test_known_error_on_mps_is_a_warning_with_our_remedy() -> None:
    outcomes = dict.fromkeys((error.title for error in KNOWN_ERRORS), "")
    outcomes[KNOWN_ERRORS[2].title] = "wrong"
    finding = by_name(dataclasses.replace(M1, known_errors={"mps": outcomes}))["mps error"]
    assert finding.level == "warning"
    assert finding.text == "pytorch#195163, bmm with a reduction of 40,000: wrong"
    assert "no call is that long" in finding.hint
    finding = by_name(dataclasses.replace(AMX, known_errors={"cpu": outcomes}))["cpu error"]
    assert finding.level == "problem"


def test_container_cpu_quota(tmp_path: Path) -> None:
    path = tmp_path / "cpu.max"
    assert module.cpu_quota(path) is None
    path.write_text("max 100000\n")
    assert module.cpu_quota(path) is None
    path.write_text("150000 100000\n")
    assert module.cpu_quota(path) == 1.5


@pytest.mark.parametrize("disk_free", [0, 100 * GIB])
def test_doctor_problem_gives_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, disk_free: int
) -> None:
    monkeypatch.setattr(
        module, "read_machine", lambda: dataclasses.replace(AMX, disk_free=disk_free)
    )
    with pytest.raises(SystemExit) if disk_free == 0 else contextlib.nullcontext() as stopped:
        doctor(json=True)
    assert stopped is None or stopped.value.code == 1
    values = json.loads(capsys.readouterr().out)
    assert values["machine"]["disk_free"] == disk_free
    assert {"level", "name", "text", "hint"} == set(values["findings"][0])


def test_doctor_shows_and_clears_kept_choices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    line = next(finding for finding in check(M1) if finding.name == "choices")
    assert "no measurements are kept" in line.text
    choices.save(
        choices.folder() / "a.json",
        "training step of tiny",
        "cpu bf16, 1.6x as fast as cpu fp32",
        {},
    )
    shown = doctor_text(check(dataclasses.replace(M1, kept_choices=choices.list_saved())))
    assert "choice: training step of tiny: cpu bf16, 1.6x as fast as cpu fp32" in shown
    doctor(clear_choices=True)
    assert "removed 1 kept measurement" in capsys.readouterr().out
    assert choices.list_saved() == []
