"""Which candidates are tried, what is left out and why, and whole processes that really measure."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from m1clip.bench import compare as sweep_module
from m1clip.bench.candidate import (
    Candidate,
    config_of,
    devices_of,
    focus,
    precisions_of,
    recall,
    remember,
    sweep,
    text_config,
)
from m1clip.bench.compare import Ask, Failed, Session, SizeClock, Worker, absent, compare, obstacle, read_document
from m1clip.bench.workload import HybridBatch, HybridClip
from m1clip.config import Config, ModelConfig, OptimConfig
from m1clip.data.images import Preprocess
from m1clip.errors import UserError
from m1clip.hardware.device import Device
from m1clip.hardware.facts import Facts, read_facts
from m1clip.hardware.precision import autocast
from m1clip.model.clip import CLIP
from m1clip.model.presets import ClipShape
from m1clip.training.memory import stand_in
from m1clip.training.step import TrainStep

from .made import MACHINE, document, probe, result

LAPTOP = Facts(
    system="Darwin", machine="arm64", cpu="Apple M1", cores=8, performance_cores=4, memory_bytes=2**33, mps=True
)
OLD_CARD = dataclasses.replace(MACHINE, cuda_capability=(7, 5))


def test_what_is_compared_on_each_machine() -> None:
    assert devices_of(MACHINE, ()) == ("cuda", "cpu")
    assert devices_of(LAPTOP, ()) == ("mps", "cpu")
    assert devices_of(MACHINE, ("cpu",)) == ("cpu",)
    with pytest.raises(UserError, match="--devices mps: this machine has none"):
        devices_of(MACHINE, ("mps",))
    assert precisions_of(MACHINE, "cuda", ()) == ("fp32", "bf16")
    assert precisions_of(MACHINE, "cuda", ("fp16",)) == ("fp16",)
    assert precisions_of(OLD_CARD, "cuda", ()) == ("fp32",)


def test_the_focus_changes_one_thing_at_a_time() -> None:
    found = focus(MACHINE, "small", [12], ["cuda", "cpu"], [], "muon")
    labels = [candidate.way for candidate in found]
    assert labels[:4] == [
        "cuda bf16 sdpa replayed",
        "cuda fp32 sdpa replayed",
        "cpu bf16 bmm",
        "cpu fp32 bmm",
    ]  # the base first
    for extra in ("cpu bf16 sdpa", "cuda bf16 sdpa", "cuda bf16 sdpa compiled replayed", "cpu bf16 bmm 4 threads",
                  "hybrid bf16 sdpa", "cpu bf16 bmm recompute"):  # fmt: skip
        assert extra in labels
    assert len(set(found)) == len(found)
    assert {c.batch for c in found} == {12}
    assert not any(c.device == "hybrid" for c in focus(LAPTOP, "tiny", [8], ["mps", "cpu"], [], "muon"))


def test_the_whole_product_on_request() -> None:
    found = focus(MACHINE, "small", [12], ["cpu"], [], "adamw", full=True)
    assert len(found) == 2 * 2 * 2  # precision, attention, compile
    assert {c.optimizer for c in found} == {"adamw"}


def test_a_sweep_goes_from_small_to_large() -> None:
    groups = sweep(MACHINE, ["tiny", "small"], [64, 1], ["cuda", "cpu"], [], "muon")
    assert [(group[0].model, group[0].batch) for group in groups] == [
        ("tiny", 1),
        ("tiny", 64),
        ("small", 1),
        ("small", 64),
    ]
    assert [c.way for c in groups[0]] == [
        "cuda bf16 sdpa replayed", "cpu bf16 bmm", "cuda fp32 sdpa replayed", "cpu fp32 bmm",
    ]  # fmt: skip


def test_labels_are_unique_and_short() -> None:
    plain = Candidate(model="tiny", batch=8, device="cpu", precision="bf16")
    assert plain.label == "tiny batch 8 cpu bf16 sdpa"
    assert dataclasses.replace(plain, threads=1).label == "tiny batch 8 cpu bf16 sdpa 1 thread"
    assert Candidate(**json.loads(json.dumps(plain.to_dict()))) == plain


def test_the_tokenizer_gives_each_preset_its_vocabulary() -> None:
    assert text_config("small").tokenizer == "char"
    assert text_config("ViT-B-32").tokenizer == "bpe"
    assert config_of(Candidate(model="small", batch=1, device="cpu", precision="fp32"), 8).train.batch == 2


class Clockwork(Session):
    """A session whose time stands where the test puts it."""

    def __init__(self, tmp_path: Path, left: float) -> None:
        super().__init__(document([]), tmp_path, 480.0, lambda text: None)
        self._left = left
        self.rates = {("cpu", "bf16"): 1e12, ("cuda", "bf16"): 5e14}

    @property
    def left(self) -> float:
        return self._left


def test_what_would_take_too_long_or_not_fit_is_not_tried(tmp_path: Path) -> None:
    session = Clockwork(tmp_path, left=400.0)
    big = Candidate(model="200M", batch=1024, device="cpu", precision="bf16")
    kind, why = obstacle(session, big, {}, allowed=20.0) or ("", "")
    assert kind == "time"
    assert "too long within --minutes" in why
    small = Candidate(model="tiny", batch=8, device="cuda", precision="bf16")
    assert obstacle(session, small, {}, allowed=20.0) is None
    # 60 GB at batch 8 is about 110 GB at batch 16: more than the 69 GB of this card
    seen = {("1B", "cuda bf16 sdpa"): [(Candidate(model="1B", batch=8, device="cuda", precision="bf16"), 0.1, 60e9)]}
    next_one = Candidate(model="1B", batch=16, device="cuda", precision="bf16")
    assert (obstacle(session, next_one, seen, 20.0) or ("",))[0] == "memory"
    failed = {("tiny", small.way): [(small, float("inf"), float("inf"))]}
    after = dataclasses.replace(small, batch=16)
    assert obstacle(session, after, failed, 20.0) == ("memory", "batch 8 already failed")


def test_each_size_gets_its_part_of_the_time(tmp_path: Path) -> None:
    session = Clockwork(tmp_path, left=400.0)
    groups = sweep(MACHINE, ["tiny", "1B"], [1, 64], ["cuda", "cpu"], [], "muon")
    clock = SizeClock(session, groups)
    assert clock.share(groups[0][0]) == pytest.approx(2.0 * 200 / 8)
    session._left = 190.0  # tiny has used up its half, and more
    assert clock.share(groups[0][1]) == 2.0  # what is cheap is still measured
    assert clock.share(groups[2][0]) == pytest.approx(2.0 * 95 / 8)  # tiny is not done: two sizes still share
    session._left = 0.5
    assert clock.share(groups[2][1]) == 0.5


def test_time_that_is_gone_leaves_the_rest_out(tmp_path: Path) -> None:
    session = Clockwork(tmp_path, left=0.0)
    groups = sweep(MACHINE, ["small"], [64], ["cpu"], ["bf16"], "muon")
    sweep_module.run_sweep(session, groups)
    assert [item["kind"] for item in session.document["left_out"]] == ["time"]
    assert json.loads((tmp_path / "comparison.json").read_text())["results"] == []  # written as it goes


def test_absent_devices_are_named_unless_others_were_asked_for() -> None:
    assert set(absent(LAPTOP, ())) == {"cuda"}
    assert absent(LAPTOP, ("cpu",)) == {}


@pytest.mark.parametrize(("values", "message"), [
    ({"model": "smal"}, "did you mean 'small'"), ({"sizes": ("tinny",)}, "did you mean 'tiny'"),
    ({"batches": (0,)}, "--batch"), ({"batches": ()}, "--batch"), ({"minutes": 0.0}, "--minutes"),
])  # fmt: skip
def test_a_wrong_question_is_one_line(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Ask(**values)


def test_what_was_measured_is_kept_for_plan(tmp_path: Path) -> None:
    one = result(Candidate(model="tiny", batch=8, device="cpu", precision="bf16"), 2.0)
    remember(MACHINE, [one], tmp_path)
    remember(MACHINE, [result(Candidate(model="tiny", batch=8, device="cpu", precision="bf16"), 1.0)], tmp_path)
    assert [item["seconds"] for item in recall(MACHINE, tmp_path)] == [1.0]  # the newer one
    assert recall(LAPTOP, tmp_path) == []


SMALL = ClipShape(image_size=32, patch_size=8, vision_width=32, vision_layers=1, vision_heads=2, text_width=32,
                  text_layers=1, text_heads=2, vocab_size=64, embed_dim=32, context_length=16)  # fmt: skip


def small_update(place: str, name: Any = "muon") -> TrainStep:
    """The step of a small model: whole on one device, or with its text tower on the CPU."""
    torch.manual_seed(1)
    model = CLIP(SMALL, eot_id=0)
    kind: Any = "cuda" if place == "hybrid on cuda" else "cpu"
    device = Device(kind, read_facts())
    if place.startswith("hybrid"):
        model = HybridClip.placed(model, device.torch)
    config = Config(optim=OptimConfig(name=name), model=ModelConfig(graph=False))
    return TrainStep(model, config, device, "fp32", Preprocess(image_size=32), autocast(device, "fp32"))


def test_towers_on_two_devices_make_the_same_step() -> None:
    """Both places are the CPU here; what is tested is the path of tokens, features and gradients."""
    torch.manual_seed(0)
    batch = stand_in(SMALL, 4, 16, eot_id=0)
    losses, gradients = [], []
    for place in ("cpu", "hybrid"):
        update = small_update(place)
        given = HybridBatch.of(batch) if place == "hybrid" else batch
        losses.append(float(update.backward(given.to(update.device.torch), 0)))
        gradients.append([p.grad.clone() for p in update.parameters if p.grad is not None])
    assert losses[0] == losses[1]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    moved = HybridBatch.of(batch).to(torch.device("meta"))
    assert moved.tokens.device.type == "cpu"
    assert moved.images.device.type == "meta"


@pytest.mark.parametrize(("place", "order"), [("cpu", ["text", "image"]), ("hybrid", ["image", "text"])])
def test_the_accelerator_gets_its_work_before_the_cpu_begins(place: str, order: list[str]) -> None:
    update, seen = small_update(place), []
    for name, tower in (("image", update.model.image), ("text", update.model.text)):
        tower.register_forward_hook(lambda *_, name=name: seen.append(name))
    batch = stand_in(SMALL, 4, 16, eot_id=0)
    update.backward(HybridBatch.of(batch) if place == "hybrid" else batch, 0)
    assert seen == order


@pytest.mark.skipif(not torch.cuda.is_available(), reason="wants a second device, a CUDA card; none here")
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_towers_on_a_card_and_the_cpu_learn_as_on_the_cpu(optimizer: str) -> None:
    torch.manual_seed(0)
    batch = stand_in(SMALL, 8, 16, eot_id=0)
    found = []
    for place in ("cpu", "hybrid on cuda"):
        update = small_update(place, optimizer)
        given = HybridBatch.of(batch) if place != "cpu" else batch
        losses = [float(update(given, step)[0]) for step in range(1, 5)]
        found.append((losses, [p.detach().cpu() for p in update.parameters]))
    assert found[0][0][-1] < found[0][0][0]
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-3)
    for one, two in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(one, two, rtol=1e-2, atol=1e-3)


@pytest.mark.slow
def test_a_worker_measures_the_real_step(tmp_path: Path) -> None:
    candidate = Candidate(model="tiny", batch=2, device="cpu", precision="bf16", attention="bmm", threads=1)
    with Worker(tmp_path / "log") as worker:
        opened = worker.ask("open", 120, candidate=candidate.to_dict(), images=8)
        assert opened["parameters"] > 1e6
        found = worker.ask("steps", 120, count=2, seconds=60.0)
        assert len(found["samples"]) == 2
        assert {"seconds", "data", "forward", "backward", "optimizer"} <= set(found["samples"][0])
        memory = worker.ask("memory", 120)
        assert memory["known"]
        assert sum(memory["parts"].values()) == memory["total"]
        assert memory["parts"]["weights"] == pytest.approx(4 * opened["parameters"], rel=0.02)
        parity = worker.ask("parity", 120)
        assert 0 < parity["gradient_difference"] < 0.15
        # Another batch of the same model in the same process, then one that cannot be
        one = dataclasses.replace(candidate, batch=1, precision="fp32")
        assert worker.ask("open", 120, candidate=one.to_dict(), images=8)["parameters"] == opened["parameters"]
        assert worker.ask("parity", 120)["gradient_difference"] < 1e-4
        wrong = dataclasses.replace(candidate, precision="fp16")
        with pytest.raises(Failed, match="not on cpu"):
            worker.ask("open", 120, candidate=wrong.to_dict(), images=8)
        assert worker.alive
    with pytest.raises(Failed, match="measuring process"):
        worker.ask("memory", 5)


@pytest.mark.slow
def test_a_whole_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("m1clip.bench.compare.MOST_ROUNDS", 1)
    monkeypatch.setattr("m1clip.bench.compare.focus", lambda *a: focus(*a)[:1])
    monkeypatch.setattr("m1clip.bench.compare.Session.probe", lambda self, kind, precisions, compile: (
        self.document["devices"].append(probe(kind)), self.write()))  # fmt: skip
    seen = []
    made = compare(
        Ask(model="tiny", batches=(2,), devices=("cpu",), minutes=5.0),
        tmp_path / "out",
        lambda text, used: seen.append(text),
    )
    assert made["complete"]
    assert len(made["results"]) == 1
    assert made["results"][0]["seconds"]["n"] >= 1
    assert any("first steps" in text for text in seen)
    assert read_document(tmp_path / "out")["verdict"]
    html = (tmp_path / "out" / "comparison.html").read_text(encoding="utf-8")
    assert "tiny, batch 2" in html
    assert len(recall(read_facts())) == 1


def test_one_more_is_judged_by_those_like_it(tmp_path: Path) -> None:
    from m1clip.bench.compare import Open, needed

    def opened(precision: str, step: float) -> Open:
        candidate = Candidate(model="small", batch=12, device="cpu", precision=precision)
        return Open(candidate, cast(Any, None), {}, [step])

    session = Session({}, tmp_path, 240.0, lambda text: None)
    group, took = [opened("bf16", 2.0), opened("fp32", 7.0)], {"bf16": 10.0, "fp32": 30.0}
    half, whole = (
        Candidate(model="small", batch=12, device="cpu", precision=p, recompute=True) for p in ("bf16", "fp32")
    )
    compiled = Candidate(model="small", batch=12, device="cpu", precision="bf16", compile=True)
    assert needed(session, group, took, half) == 10 + (5 * 2 + 2) * 2 + (5 * 7 + 2)
    assert needed(session, group, took, whole) - needed(session, group, took, half) == 20 + 5 * 5
    assert needed(session, group, took, compiled) - needed(session, group, took, half) == 0.3 * 240 - 10
