"""Device rules as functions of facts, and obstacles to torch.compile."""

import dataclasses
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from machines import H200, M1, M4, PASCAL, TURING, XEON, mac, product_is_wrong

from m1clip.errors import UserError
from m1clip.hardware import device
from m1clip.hardware.device import (
    Device,
    Kind,
    available,
    choose_device,
    choose_precision,
    default_precision,
    rules,
)
from m1clip.hardware.machine_info import MachineInfo, environment, read_machine_info, usable_cpus


@pytest.mark.parametrize(
    ("facts", "kinds"),
    [
        (M1, ("mps", "cpu")),
        (M4, ("mps", "cpu")),
        (XEON, ("cpu",)),
        (PASCAL, ("cuda", "cpu")),
        (H200, ("cuda", "cpu")),
    ],
)
def test_available_devices_and_the_choice_of_auto(
    facts: MachineInfo, kinds: tuple[str, ...]
) -> None:
    assert available(facts) == kinds
    assert choose_device("auto", facts) == kinds[0]
    for kind in kinds:
        assert choose_device(kind, facts) == kind


def test_mlx_is_chosen_by_name_only_and_keeps_the_rules_of_torchs_device() -> None:
    m1, linux = dataclasses.replace(M1, mlx="0.32.4"), dataclasses.replace(XEON, mlx="0.32.4")
    assert (available(m1), choose_device("auto", m1)) == (("mps", "cpu", "mlx"), "mps")
    assert (available(linux), choose_device("auto", linux), choose_device("mlx", linux)) == (
        ("cpu", "mlx"),
        "cpu",
        "mlx",
    )
    on_mac, on_linux = rules("mlx", m1), rules("mlx", linux)
    assert on_mac.max_reduction == rules("mps", m1).max_reduction, (
        "for frozen towers and evaluations"
    )
    assert on_mac.worker_start == "spawn"
    assert on_linux.max_reduction is None
    for rule in (on_mac, on_linux):
        assert (rule.precisions, rule.bf16, rule.fixed_shapes) == (("fp32", "bf16"), "no", True)
    with pytest.raises(
        UserError, match=r"--device mlx: not available .* pip install 'm1clip\[mlx\]'"
    ):
        choose_device("mlx", M1)


@pytest.mark.parametrize(
    ("facts", "missing"), [(M1, "cuda"), (XEON, "cuda"), (XEON, "mps"), (H200, "mps")]
)
def test_missing_device_is_an_error(facts: MachineInfo, missing: str) -> None:
    with pytest.raises(
        UserError, match=f"--device {missing}: not available on this machine"
    ) as caught:
        choose_device(missing, facts)
    assert ", ".join(available(facts)) in str(caught.value)


def test_two_devices_are_chosen_by_name_and_follow_the_rules_of_both() -> None:
    assert choose_device("mps+cpu", M1) == "mps+cpu"
    assert choose_device("cpu+cpu", XEON) == "cpu+cpu"
    for facts, missing in ((XEON, "cuda+cpu"), (M1, "cuda+cpu"), (H200, "mps+cpu")):
        with pytest.raises(UserError, match=re.escape(f"--device {missing}: not available")):
            choose_device(missing, facts)
    pair = rules("cuda+cpu", H200)
    assert pair.precisions == tuple(
        name for name in rules("cuda", H200).precisions if name in rules("cpu", H200).precisions
    )
    assert not pair.graphs
    assert (pair.bf16, rules("mps+cpu", M1).bf16) == ("measure", "no")
    assert rules("mps+cpu", M1).max_reduction == rules("mps", M1).max_reduction
    assert default_precision("mps+cpu", M1) == "fp32"
    pair_of_cpus = Device("cpu+cpu", XEON)
    assert (pair_of_cpus.name, pair_of_cpus.kind) == ("cpu+cpu", "cpu")
    assert pair_of_cpus.is_hybrid
    assert not Device("cpu", XEON).is_hybrid
    assert str(Device("mps+cpu", M1).torch) == "mps"
    assert str(Device("mps+cpu", M1).text_torch) == "cpu"


@pytest.mark.parametrize(
    ("kind", "facts", "precision"),
    [
        ("cuda", H200, "bf16"),
        ("cuda", TURING, "fp32"),
        ("cuda", PASCAL, "fp32"),
        ("mps", M1, "fp32"),
        ("mps", M4, "fp32"),  # unless measured
        ("cpu", XEON, "fp32"),
        ("cpu", dataclasses.replace(XEON, cpu_bf16=True), "bf16"),
        ("cpu", M1, "fp32"),
    ],
)
def test_default_precision(kind: str, facts: MachineInfo, precision: str) -> None:
    assert choose_precision("auto", kind, facts) == precision  # type: ignore[arg-type]


def test_unsupported_precision_is_an_error() -> None:
    assert choose_precision("fp16", "cuda", PASCAL) == "fp16"
    assert choose_precision("bf16", "mps", M1) == "bf16"
    assert choose_precision("fp32", "cuda", H200) == "fp32"
    with pytest.raises(UserError, match="bf16: not supported on cuda"):
        choose_precision("bf16", "cuda", TURING)
    assert choose_precision("fp16", "cpu", XEON) == "fp16"
    with_mlx = dataclasses.replace(M1, mlx="0.32.4")
    with pytest.raises(
        UserError, match=r"fp16: not supported on mlx \(choose from fp32, bf16, auto\)"
    ):
        choose_precision("fp16", "mlx", with_mlx)


@pytest.mark.parametrize(
    ("kind", "facts", "expected"),
    [
        ("mps", M1, (False, False, True, "spawn")),
        ("mps", M4, (False, False, True, "spawn")),
        ("cuda", H200, (True, True, False, "forkserver")),
        ("cpu", XEON, (False, False, False, "fork")),
        ("cpu", M1, (False, False, False, "spawn")),
    ],
)
def test_rules(kind: Kind, facts: MachineInfo, expected: tuple[object, ...]) -> None:
    rule = rules(kind, facts)
    assert (rule.non_blocking, rule.pin_memory, rule.fixed_shapes, rule.worker_start) == expected
    assert kind != "cpu" or rule.bf16 == "measure"


def test_threads_are_the_physical_performance_cores() -> None:
    assert [device.threads(0, facts) for facts in (M1, M4, XEON)] == [4, 4, 16]
    assert device.threads(3, XEON) == 3


def test_environment_variables_unless_set_by_the_user() -> None:
    name = "PYTORCH_MPS_HIGH_WATERMARK_RATIO"
    assert environment("Darwin", {"OMP_WAIT_POLICY": "active"}) == {name: "1.0"}
    assert environment("Darwin", {name: "0.7"}) == {"OMP_WAIT_POLICY": "passive"}
    spin = "GOMP_SPINCOUNT"  # of GNU's OpenMP
    assert environment("Linux", {}) == {"OMP_WAIT_POLICY": "passive", spin: "10000"}
    assert environment("Linux", {spin: "0"}) == {"OMP_WAIT_POLICY": "passive"}
    assert environment("Linux", {"OMP_WAIT_POLICY": "PASSIVE"}) == {spin: "10000"}
    assert environment("Linux", {"OMP_WAIT_POLICY": "active"}) == {}, (
        "spinning is the user's choice"
    )


def test_facts_of_this_machine() -> None:
    facts = read_machine_info()
    assert 1 <= facts.performance_cores <= facts.cores <= usable_cpus()
    assert facts.torch == torch.__version__
    assert facts.memory_bytes > 2**30
    assert facts.cpu
    assert MachineInfo(**dataclasses.asdict(facts)) == facts
    assert choose_device("cpu", facts) == "cpu"
    assert (facts.cuda is not None) == torch.cuda.is_available()


def test_compile_obstacles() -> None:
    assert device.compile_obstacle("cpu", "/opt/venv/torch", "g++", triton=False) == ""
    assert "C++ compiler" in device.compile_obstacle("cpu", "/opt/venv/torch", None, triton=False)
    assert "contains a space" in device.compile_obstacle(
        "cpu", "/home/me/my code/torch", "g++", triton=False
    )
    assert device.compile_obstacle("cuda", "/home/me/my code/torch", None, triton=True) == ""
    assert "triton" in device.compile_obstacle("cuda", "/opt/venv/torch", "g++", triton=False)
    assert device.compile_obstacle("mps", "/opt/venv/torch", None, triton=False) == ""


CHIPS = {
    f"M{n}": mac(f"Apple M{n} {size}".strip())
    for n, size in enumerate(("Pro", "", "Max", "", "Ultra"), 1)
}


def test_chip_is_read_from_its_name() -> None:
    assert [device.apple_chip(facts) for facts in CHIPS.values()] == [1, 2, 3, 4, 5]
    assert device.apple_chip(mac("Apple M1 (Virtual)")) == 1
    assert device.apple_chip(mac("Apple processor")) == 1, "an unknown chip gets every rule"


@pytest.mark.parametrize(
    ("chip", "limit"), [("M1", 166), ("M2", 166), ("M3", 65_536), ("M4", 65_536), ("M5", 65_536)]
)
def test_rows_at_once_of_a_vit_b_16(chip: str, limit: int) -> None:
    assert rules("mps", CHIPS[chip]).max_batch_rows(197) == limit
    assert rules("cpu", CHIPS[chip]).max_batch_rows(197) is None
    assert rules("cuda", H200).max_batch_rows(197) is None


@given(st.integers(1, 40_000), st.sampled_from(["M1", "M2"]))
def test_calls_within_the_limit_are_never_wrong(tokens: int, chip: str) -> None:
    rows = rules("mps", CHIPS[chip]).max_batch_rows(tokens)
    assert rows is not None
    assert rows >= 1
    assert rows == 1 or not product_is_wrong(rows * tokens, (64, 64))
    assert rows == 65_536 or (rows + 1) * tokens >= 32_767, "no smaller than needed"
