"""33: the doctor's reproducibility checklist, and the page of do's and don'ts."""

import re
from pathlib import Path

import machines
import pytest
import torch

from m1clip.bench.doctor import Machine, check_reproducibility, gives_same_bits
from m1clip.hardware.device import Device
from m1clip.hardware.machine_info import read_machine_info

DOCS = Path(__file__).parents[3] / "docs"


def test_checklist_names_versions_and_devices() -> None:
    machine = Machine(facts=machines.H200, repeatable={"cuda": False, "cpu": True}, threads=3)
    findings = {finding.name: finding for finding in check_reproducibility(machine)}
    assert findings["reproduce: cuda"].level == "warning"
    assert "--device cpu" in findings["reproduce: cuda"].hint
    assert findings["reproduce: cpu"].level == "ok"
    assert "with 3 threads" in findings["reproduce: cpu"].text
    assert machines.H200.torch in findings["reproduce: versions"].text
    assert "--seed" in findings["reproduce: run"].text


def test_same_bits_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = Device("cpu", read_machine_info())
    assert gives_same_bits(cpu)
    grad = torch.autograd.grad
    calls: list[int] = []

    def rounded_differently(*arguments: object) -> tuple[torch.Tensor]:
        (gradients,) = grad(*arguments)  # type: ignore[arg-type]
        calls.append(1)
        return (gradients + 1e-6 * len(calls),)

    monkeypatch.setattr(torch.autograd, "grad", rounded_differently)
    assert not gives_same_bits(cpu)


def test_each_advice_links_to_its_measurement() -> None:
    lines = (DOCS / "dos-and-donts.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith("| ") and "measurement" not in line]
    assert len(rows) >= 10
    for row in rows:
        links = re.findall(r"\]\(([^)#]+)", row)
        assert links, row
        for link in links:
            assert (DOCS / link).exists(), link
        assert "`" in row, f"no command: {row}"
