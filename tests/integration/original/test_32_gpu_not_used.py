"""32: doctor says why the GPU is not used."""

import dataclasses
from typing import Any

import machines
import pytest

from m1clip.bench.doctor import Finding, Machine, check_gpu


def gpu_finding(machine: Machine) -> Finding:
    (finding,) = check_gpu(machine)
    return finding


def machine(facts: Any, *kinds: str, **changes: Any) -> Machine:
    return Machine(facts=facts, kernel_failures=dict.fromkeys((*kinds, "cpu"), ""), **changes)


OLD_MAC = dataclasses.replace(machines.M1, mps=False, macos="13.6", torch="2.14")
INTEL_MAC = dataclasses.replace(OLD_MAC, machine="x86_64")
DRIVER = {"nvidia_driver": True}
CUDA = {**DRIVER, "torch_cuda_build": "13.0"}


@pytest.mark.parametrize(
    ("facts", "level", "text", "hint"),
    [
        (machine(machines.XEON), "ok", "no NVIDIA driver and no Apple chip", ""),
        (machine(machines.XEON, **DRIVER), "problem", "built without CUDA", "CUDA build"),
        (
            machine(machines.XEON, **CUDA, variables={"CUDA_VISIBLE_DEVICES": ""}),
            "problem",
            "CUDA_VISIBLE_DEVICES='' hides it",
            "unset",
        ),
        (machine(machines.XEON, **CUDA), "problem", "driver is older", "nvidia-smi"),
        (machine(OLD_MAC), "warning", "no MPS on macOS 13.6", "macOS 14"),
        (machine(INTEL_MAC, rosetta=True), "problem", "Intel Python", "arm64 Python"),
        (machine(INTEL_MAC), "ok", "Intel Mac", ""),
        (machine(machines.H200, "cuda", **CUDA), "ok", "cuda can be used", ""),
        (machine(machines.M1, "mps"), "ok", "mps can be used", ""),
        (
            machine(machines.M1, "mps", kept_choices=["tiny at batch 64: cpu fp32"]),
            "ok",
            "auto uses the CPU because it was faster (tiny at batch 64: cpu fp32)",
            "",
        ),
        (
            Machine(facts=machines.H200, kernel_failures={"cuda": "no kernel image", "cpu": ""}),
            "problem",
            "its kernels fail",
            "another version",
        ),
    ],
)
def test_reason_is_that_of_the_machine(facts: Machine, level: str, text: str, hint: str) -> None:
    finding = gpu_finding(facts)
    assert finding.level == level
    assert text in finding.text
    assert hint in finding.hint
