"""`plan` decides a run as `train` does, and predicts what it needs."""

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from machines import H200, XEON

from m1clip import console
from m1clip.bench import decide
from m1clip.bench import plan as plans
from m1clip.bench.compare import CompareOptions
from m1clip.bench.decide import decide_step, default_configuration
from m1clip.bench.plan import make_plan, plan_text, sent_bytes
from m1clip.cli.machine import PLANNED
from m1clip.config import NAMES, Config, OptimConfig
from m1clip.errors import UserError
from m1clip.formatting import amount
from m1clip.hardware.device import Device
from m1clip.hardware.machine_info import MachineInfo
from m1clip.optimizers import MUON, OPTIMIZERS
from m1clip.training import device_choice, workbench
from m1clip.training.distributed import Ranks
from m1clip.training.memory import MemoryEstimate
from m1clip.training.spec import RunSpec, Settings, setting
from m1clip.training.workbench import Workbench

from .examples import configuration

IMAGES = 600  # of the planned run, and of the synthetic images of the run of train
Result = TypeVar("Result")


class OneProcess(Ranks):
    """Several ranks, all of which are this process."""

    def on_rank0(self, work: Callable[[], Result]) -> Result:
        return work()

    def on_all_ranks(self, work: Callable[[], Result]) -> Result:
        return work()

    def check_same(self, facts: Any) -> None:
        pass

    def abort(self, reason: str) -> Any:
        raise UserError(reason)


@pytest.fixture(params=[XEON, H200], ids=["XEON", "H200"])
def facts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> MachineInfo:
    """A machine on which measurements have fixed results: the first candidate is the fastest."""
    machine: MachineInfo = request.param

    def choose(
        config: Any, model_init: Any, facts: MachineInfo, tokens: int
    ) -> device_choice.Choice:
        options = device_choice.candidates(config.train.device, config.train.precision, facts)
        measured = tuple(device_choice.Candidate(*option, seconds=(1.0,)) for option in options)
        return device_choice.Choice(*options[0], candidates=measured if len(measured) > 1 else ())

    def peak(estimate: MemoryEstimate, batch: int, checkpointing: bool) -> float:
        return 1e9 + batch * (4e6 if checkpointing else 1e7)

    def memory_limit(config: Config, device: Device, facts: MachineInfo) -> float:
        return amount(config.train.memory, "B", "") if config.train.memory else 3e9

    monkeypatch.setattr(device_choice, "choose", choose)
    monkeypatch.setattr(MemoryEstimate, "peak", peak)
    for module in (workbench, plans):
        monkeypatch.setattr(module, "read_machine_info", lambda: machine)
    for module in (workbench, decide):
        monkeypatch.setattr(module, "memory_limit", memory_limit)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10**10, 10**10))
    monkeypatch.setattr(plans, "process_bytes", lambda facts: 10**9)
    monkeypatch.setattr(plans, "step_time", lambda *arguments: (0.5, "as the test says"))
    monkeypatch.setattr(Device, "total_bytes", lambda device: int(3.2e9))
    monkeypatch.setattr(Workbench, "_readable_images", lambda self, config: IMAGES)
    return machine


def spec_of_train(options: dict[str, Any], ranks: int) -> RunSpec:
    """What `m1clip train` decides on synthetic images; it opens them, but decodes none."""
    same = {"synthetic_images": IMAGES, "captions_per_step": 1}
    with console.quiet():
        return Workbench(OneProcess(size=ranks)).resolve(Settings({**options, **same}))


@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        ({}, 1),
        ({"batch_size": "auto", "memory": "1.5GB", "micro_batch": 4}, 1),
        ({"batch_size": 200, "memory": "2GB", "steps": 7}, 1),
        ({"batch_size": 200, "memory": "1.02GB", "epochs": 2.5}, 1),
        ({"batch_size": 200, "micro_batch": 8, "grad_checkpointing": True}, 1),
        ({"batch_size": 500, "precision": "fp32", "optimizer": "adamw"}, 2),
        ({"batch_size": 500, "fsdp": "off"}, 2),
    ],
)
def test_plan_decides_as_train_does(
    options: dict[str, Any], ranks: int, facts: MachineInfo
) -> None:
    plan = make_plan(options, IMAGES, ranks, "1GB" if ranks > 1 else None)
    spec = spec_of_train(options, ranks)
    for name in PLANNED:
        section, key = NAMES[name]
        assert plan["config"][section].get(key) == setting(spec.config, name), name
        assert plan["chosen_by"].get(name) == spec.chosen_by.get(name), name
    for name in ("batch_size", "micro_batch", "grad_checkpointing", "steps", "fsdp"):
        assert plan[name] == setting(spec.config, name)
    assert plan["seconds"] == plan["steps"] * plan["step_seconds"]
    rows = plan["micro_batch"] or plan["batch_size"] // ranks
    assert plan["memory_bytes"] == 1e9 + rows * (4e6 if plan["grad_checkpointing"] else 1e7)
    assert f"steps {spec.config.train.steps} (" in plan_text(plan)
    if options.get("memory") == "1.02GB":
        how = "at batch 200 in micro-batches of 2 in"
        assert how in plan_text(plan)
    if options.get("memory") == "2GB":
        assert "at batch 200 with gradient checkpointing in" in plan_text(plan)


def test_plan_shards_weights_that_do_not_fit_one_gpu(facts: MachineInfo) -> None:
    for batch, fsdp in ((500, "on"), (50, "off")):
        plan = make_plan({"batch_size": batch}, IMAGES, 2, "1GB")
        assert plan["ranks"]["fsdp"] == (fsdp if facts is H200 else "off")


def test_bandwidth_of_one_host_is_not_taken_for_that_of_a_network(facts: MachineInfo) -> None:
    plan = make_plan({"batch_size": 50}, IMAGES, 2, "1GB")
    assert plan_text(plan).count("(as given)") == 1
    plan["ranks"]["measured_ranks"] = 2
    assert "(measured between 2 ranks)" in plan_text(plan)
    plan["ranks"]["in_shared_memory"] = True
    assert "in shared memory; other hosts are slower)" in plan_text(plan)


def test_memory_that_is_too_small_is_the_error_of_train(facts: MachineInfo) -> None:
    errors = []
    for decide_run in (lambda o: make_plan(o, IMAGES), lambda o: spec_of_train(o, 1)):
        with pytest.raises(UserError, match="--memory 1GB: tiny needs at least 1") as raised:
            decide_run({"memory": "1GB"})
        errors.append(str(raised.value))
    assert errors[0] == errors[1]


def test_default_optimizer_has_one_source() -> None:
    assert CompareOptions().optimizer == OptimConfig().optimizer == configuration().optimizer


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_updates_are_sent_if_a_part_of_the_optimizer_is_muon(optimizer: str) -> None:
    gradients_and_features = sent_bytes(1000, 8, 4, 2, "adamw", "fp32")
    updates = 0.5 * 4 * 1000 if MUON in OPTIMIZERS[optimizer].parts else 0
    assert sent_bytes(1000, 8, 4, 2, optimizer, "fp32") == gradients_and_features + updates


def test_settings_of_a_measured_configuration_are_those_of_train() -> None:
    default = default_configuration(H200, "original", 12, "cuda", "bf16", "adamw")
    assert (default.cuda_graph, default.is_default, default.optimizer) == (True, True, "adamw")
    spec = decide_step(H200, default)
    train = spec.config.train
    assert (train.device, train.precision, train.batch_size) == ("cuda", "bf16", 12)
    assert (spec.config.data.captions_per_step, train.text_contrast) == (1, 0.0)
    one_image = default_configuration(XEON, "tiny", 1, "cpu", "fp32", "muon")
    assert (one_image.batch_size, one_image.cuda_graph) == (1, False)
    assert decide_step(XEON, configuration(precision="fp16")).config.train.precision == "fp16"
