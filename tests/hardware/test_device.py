"""Device rules as functions of facts, and obstacles to torch.compile."""

from __future__ import annotations

import pytest
import torch

from m1clip.errors import UserError
from m1clip.hardware import device as compiler
from m1clip.hardware.device import (
    Kind,
    available,
    check_compile,
    choose_device,
    choose_precision,
    compile_obstacle,
    rules,
    threads,
)
from m1clip.hardware.facts import Facts, environment, read_facts, usable_cpus


def mac(chip: str, cores: int, fast: int) -> Facts:
    return Facts(system="Darwin", machine="arm64", cpu=chip, cores=cores, performance_cores=fast,
                 memory_bytes=16 * 2**30, mps=True)  # fmt: skip


def linux(cpu: str, cores: int, card: str | None = None, capability: tuple[int, int] = (0, 0)) -> Facts:
    return Facts(system="Linux", machine="x86_64", cpu=cpu, cores=cores, performance_cores=cores,
                 memory_bytes=64 * 2**30, cuda=card, cuda_capability=capability)  # fmt: skip


M1, M4 = mac("Apple M1 Pro", 8, 6), mac("Apple M4", 10, 4)
XEON = linux("Intel(R) Xeon(R) Platinum 8481C", 16)
PASCAL = linux("Intel(R) Core(TM) i7-7700", 4, "GeForce GTX 1080", (6, 1))
TURING = linux("AMD Ryzen 5 3600", 6, "Tesla T4", (7, 5))
H200 = linux("Intel(R) Xeon(R) Platinum 8558", 48, "NVIDIA H200", (9, 0))


@pytest.mark.parametrize(
    ("facts", "kinds"),
    [(M1, ("mps", "cpu")), (M4, ("mps", "cpu")), (XEON, ("cpu",)), (PASCAL, ("cuda", "cpu")), (H200, ("cuda", "cpu"))],
)
def test_available_devices_and_the_choice_of_auto(facts: Facts, kinds: tuple[str, ...]) -> None:
    assert available(facts) == kinds
    assert choose_device("auto", facts) == kinds[0]
    for kind in kinds:
        assert choose_device(kind, facts) == kind


@pytest.mark.parametrize(("facts", "missing"), [(M1, "cuda"), (XEON, "cuda"), (XEON, "mps"), (H200, "mps")])
def test_missing_device_is_an_error(facts: Facts, missing: str) -> None:
    with pytest.raises(UserError, match=f"--device {missing}: not available on this machine") as caught:
        choose_device(missing, facts)
    assert ", ".join(available(facts)) in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "facts", "speedup", "precision"),
    [
        ("cuda", H200, None, "bf16"),
        ("cuda", TURING, None, "fp32"),
        ("cuda", PASCAL, None, "fp32"),
        ("mps", M1, 5.0, "fp32"),  # whatever was measured
        ("mps", M4, 1.6, "bf16"),
        ("mps", M4, 1.05, "fp32"),
        ("mps", M4, None, "fp32"),
        ("cpu", XEON, 6.0, "bf16"),
        ("cpu", XEON, 1.0, "fp32"),
        ("cpu", XEON, 0.3, "fp32"),
        ("cpu", M1, None, "fp32"),
    ],
)
def test_auto_precision(kind: str, facts: Facts, speedup: float | None, precision: str) -> None:
    assert choose_precision("auto", kind, facts, speedup) == precision  # type: ignore[arg-type]


def test_unsupported_precision_is_an_error() -> None:
    assert choose_precision("fp16", "cuda", PASCAL, None) == "fp16"
    assert choose_precision("bf16", "mps", M1, None) == "bf16"
    assert choose_precision("fp32", "cuda", H200, None) == "fp32"
    with pytest.raises(UserError, match="bf16: not supported on cuda"):
        choose_precision("bf16", "cuda", TURING, None)
    with pytest.raises(UserError, match=r"fp16: not supported on cpu \(choose from fp32, bf16, auto\)"):
        choose_precision("fp16", "cpu", XEON, None)


@pytest.mark.parametrize(
    ("kind", "facts", "expected"),
    [
        ("mps", M1, (False, False, False, True, "spawn", "measure")),
        ("mps", M4, (False, False, False, True, "spawn", "measure")),
        ("cuda", H200, (True, True, True, False, "forkserver", "sdpa")),
        ("cpu", XEON, (False, False, True, False, "fork", "measure")),
        ("cpu", M1, (False, False, True, False, "spawn", "measure")),
    ],
)
def test_rules(kind: Kind, facts: Facts, expected: tuple[object, ...]) -> None:
    rule = rules(kind, facts)
    found = rule.non_blocking, rule.pin_memory, rule.float64, rule.fixed_shapes, rule.worker_start, rule.attention
    assert found == expected
    assert kind != "cpu" or rule.bf16 == "measure"


def test_threads_are_the_physical_performance_cores() -> None:
    assert [threads(0, facts) for facts in (M1, M4, XEON)] == [6, 4, 16]
    assert threads(3, XEON) == 3


def test_environment_variables_unless_set_by_the_user() -> None:
    name = "PYTORCH_MPS_HIGH_WATERMARK_RATIO"
    assert environment("Darwin", {"OMP_WAIT_POLICY": "active"}) == {name: "1.0"}
    assert environment("Darwin", {name: "0.7"}) == {"OMP_WAIT_POLICY": "passive"}
    spin = "GOMP_SPINCOUNT"  # of GNU's OpenMP
    assert environment("Linux", {}) == {"OMP_WAIT_POLICY": "passive", spin: "10000"}
    assert environment("Linux", {spin: "0"}) == {"OMP_WAIT_POLICY": "passive"}
    assert environment("Linux", {"OMP_WAIT_POLICY": "PASSIVE"}) == {spin: "10000"}
    assert environment("Linux", {"OMP_WAIT_POLICY": "active"}) == {}, "spinning is the user's choice"


def test_facts_of_this_machine() -> None:
    facts = read_facts()
    assert 1 <= facts.performance_cores <= facts.cores <= usable_cpus()
    assert facts.torch == torch.__version__
    assert facts.memory_bytes > 2**30
    assert facts.cpu
    assert Facts(**facts.to_dict()) == facts
    assert choose_device("cpu", facts) == "cpu"
    assert (facts.cuda is not None) == torch.cuda.is_available()


def test_compile_obstacles() -> None:
    assert compile_obstacle("cpu", "/opt/venv/torch", "g++", triton=False) == ""
    assert "C++ compiler" in compile_obstacle("cpu", "/opt/venv/torch", None, triton=False)
    assert "contains a space" in compile_obstacle("cpu", "/home/me/my code/torch", "g++", triton=False)
    assert compile_obstacle("cuda", "/home/me/my code/torch", None, triton=True) == ""
    assert "triton" in compile_obstacle("cuda", "/opt/venv/torch", "g++", triton=False)
    assert compile_obstacle("mps", "/opt/venv/torch", None, triton=False) == ""


def test_missing_compiler_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(compiler.shutil, "which", lambda name: None)
    with pytest.raises(UserError, match="does not work here: it needs a C"):
        check_compile("cpu")
    check_compile("mps")
