"""The doctor's checks as functions of a checkup: an M1, an M4, an AMX Xeon, an H200, and this machine."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from m1clip.bench import doctor as checkup_module
from m1clip.bench.doctor import Checkup, Finding, check, cpu_quota, read_checkup, try_kernel, version
from m1clip.bench.report import doctor_json, doctor_lines
from m1clip.hardware.device import Device
from m1clip.hardware.facts import Facts, read_facts

GIB = 2**30
PACKAGES = {"numpy": "2.3.1", "pillow": "11.0", "safetensors": "0.5", "tokenizers": "0.21", "ftfy": "6.3",
            "cyclopts": "4.1", "rich": "14.0", "psutil": "6.0"}  # fmt: skip


def mac(chip: str, cores: int, fast: int) -> Facts:
    return Facts(system="Darwin", machine="arm64", cpu=chip, cores=cores, performance_cores=fast,
                 memory_bytes=16 * GIB, mps=True, torch="2.13.0", python="3.12.4")  # fmt: skip


def healthy(facts: Facts, **changes: Any) -> Checkup:
    kinds = [kind for kind, there in (("cuda", facts.cuda), ("mps", facts.mps), ("cpu", True)) if there]
    base = Checkup(
        facts=facts, kernels=dict.fromkeys(kinds, ""), rates={kind: {"fp32": 1e12, "bf16": 2e12} for kind in kinds},
        packages=PACKAGES, usable_cpus=facts.cores, memory_available=facts.memory_bytes * 3 // 4, disk_free=100 * GIB,
        file_limit=1024, compile_obstacle=dict.fromkeys(kinds, ""), meters=dict.fromkeys(kinds),
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


XEON = Facts(system="Linux", machine="x86_64", cpu="Intel(R) Xeon(R) Platinum 8481C", cores=16, performance_cores=16,
             memory_bytes=64 * GIB, torch="2.13.0+cpu", python="3.11.7")  # fmt: skip
M1 = healthy(mac("Apple M1", 8, 4), on_battery=False, low_power=False)
M4 = healthy(mac("Apple M4", 10, 4), on_battery=False, low_power=False, meters={"mps": "zeus-apple-silicon"})
AMX = healthy(XEON, shared_memory_free=8 * GIB)
H200 = healthy(
    dataclasses.replace(XEON, cuda="NVIDIA H200", cuda_capability=(9, 0), torch="2.11.0+cu130"),
    nvidia_driver=True, torch_cuda_build="13.0", shared_memory_free=8 * GIB,
)  # fmt: skip


def by_name(checkup: Checkup) -> dict[str, Finding]:
    return {finding.name: finding for finding in check(checkup)}


@pytest.mark.parametrize("checkup", [M1, M4, AMX, H200], ids=["M1", "M4", "AMX Xeon", "H200"])
def test_a_healthy_machine_has_nothing_to_mend(checkup: Checkup) -> None:
    findings = check(checkup)
    assert {finding.level for finding in findings} == {"ok"}
    names = [finding.name for finding in findings]
    assert len(names) == len(set(names))
    kinds = set(checkup.kernels)
    assert kinds <= set(names)
    assert {f"{kind} speed" for kind in kinds} <= set(names)


def test_what_is_known_of_each() -> None:
    assert "the fast ones" in by_name(M1)["threads"].text
    assert "zeus" in by_name(M4)["energy"].text
    assert "bf16 2 TFLOP/s; bf16 is the fastest" in by_name(AMX)["cpu speed"].text
    assert "CUDA 13.0" in by_name(H200)["torch"].text
    assert "NVIDIA H200" in by_name(H200)["cuda"].text


@pytest.mark.parametrize(
    ("base", "changes", "name", "level", "remedy"),
    [
        (M1, {"rosetta": True}, "rosetta", "problem", "arm64 Python"),
        (M1, {"on_battery": True}, "power", "warning", "plug in"),
        (M1, {"low_power": True}, "power", "warning", "Low Power Mode"),
        (M1, {"speed_limit": 70}, "heat", "warning", "cool"),
        (M4, {"variables": {"PYTORCH_ENABLE_MPS_FALLBACK": "1"}}, "fallback", "warning", "unset"),
        (AMX, {"variables": {"OMP_NUM_THREADS": "64"}}, "threads", "warning", "unset OMP_NUM_THREADS"),
        (AMX, {"cpu_quota": 2.0}, "threads", "warning", "--train.threads 2"),
        (AMX, {"memory_available": GIB // 2}, "memory", "problem", "close other programs"),
        (AMX, {"memory_available": 6 * GIB}, "memory", "warning", "--memory"),
        (AMX, {"disk_free": GIB // 2}, "disk", "problem", "make room"),
        (AMX, {"disk_free": 3 * GIB}, "disk", "warning", "--train.keep"),
        (AMX, {"shared_memory_free": 64 * 2**20}, "shared memory", "warning", "--shm-size"),
        (AMX, {"file_limit": 256}, "files", "warning", "ulimit"),
        (AMX, {"load": 12.0}, "load", "warning", "stop other programs"),
        (AMX, {"temperature": 95.0}, "heat", "warning", "cool"),
        (AMX, {"nvidia_driver": True}, "torch", "problem", "CUDA build"),
        (AMX, {"packages": {**PACKAGES, "ftfy": ""}}, "packages", "problem", "pip install"),
        (AMX, {"packages": {**PACKAGES, "numpy": "1.24.0"}}, "packages", "problem", "numpy>=1.26"),
        (AMX, {"compile_obstacle": {"cpu": "cannot work here: no g++"}}, "compile", "warning", "no g++"),
        (H200, {"kernels": {"cuda": "no kernel image is available", "cpu": ""}}, "cuda", "problem", "--device cpu"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_remedy(
    base: Checkup, changes: dict[str, Any], name: str, level: str, remedy: str
) -> None:
    finding = by_name(dataclasses.replace(base, **changes))[name]
    assert finding.level == level
    assert remedy in finding.remedy


@pytest.mark.parametrize(("python", "torch", "name"), [("3.10.2", "2.13.0", "python"), ("3.12.0", "2.9.1", "torch")])
def test_versions_that_are_too_old(python: str, torch: str, name: str) -> None:
    facts = dataclasses.replace(XEON, python=python, torch=torch)
    assert by_name(healthy(facts))[name].level == "problem"


def test_numpy_2_with_an_old_torch_is_a_known_bad_pair() -> None:
    checkup = healthy(dataclasses.replace(XEON, torch="2.2.0"))
    assert "numpy 2 with torch before 2.3" in by_name(checkup)["packages"].text


def test_versions_are_compared_as_numbers() -> None:
    assert version("2.13.0+cpu") == (2, 13, 0)
    assert version("2.9.1") < (2, 10)
    assert version("2.10.0.dev20260101") >= (2, 10)


def test_this_machine() -> None:
    checkup = read_checkup()
    assert checkup.kernels["cpu"] == ""
    assert checkup.rates["cpu"]["fp32"] > 0
    findings = check(checkup)
    values = json.loads(doctor_json(checkup, findings))
    assert values["facts"]["facts"]["torch"] == checkup.facts.torch
    assert len(values["findings"]) == len(findings)
    text = doctor_lines(findings)
    assert text.splitlines()[0].startswith("ok       python: ")
    assert text.endswith("warnings")


def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    device = Device("cpu", read_facts())
    assert try_kernel(device) == ""
    monkeypatch.setattr(torch, "allclose", lambda *a, **k: False)
    assert "differs" in try_kernel(device)


def test_the_quota_of_a_container(tmp_path: Path) -> None:
    path = tmp_path / "cpu.max"
    assert cpu_quota(path) is None
    path.write_text("max 100000\n")
    assert cpu_quota(path) is None
    path.write_text("150000 100000\n")
    assert cpu_quota(path) == 1.5


@pytest.mark.parametrize(("failing", "code"), [(False, None), (True, 1)])
def test_the_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: Any, failing: bool, code: int | None) -> None:
    from m1clip.cli.machine import doctor

    changes = {"disk_free": 0} if failing else {}
    monkeypatch.setattr(checkup_module, "read_checkup", lambda: dataclasses.replace(AMX, **changes))
    if code is None:
        doctor()
    else:
        with pytest.raises(SystemExit) as stopped:
            doctor()
        assert stopped.value.code == code
    assert "problems" in capsys.readouterr().out
