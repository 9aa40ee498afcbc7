"""Several ranks against one process: batches, losses, gradients, weights.

Memory, evaluation, checkpoints.
"""

import copy
import dataclasses
import math
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from small_run import TIMEOUT, environment, figures_of, prepared, small_arguments, small_config
from torch import Tensor
from torch.distributed.run import get_args_parser
from tower_run import frozen_config, patch_towers

from m1clip.config import NAMES
from m1clip.errors import UserError
from m1clip.hardware.memory import MemoryPressure
from m1clip.losses.registry import LOSSES
from m1clip.model.clip import normalize
from m1clip.optimizers import OPTIMIZERS
from m1clip.training import distributed
from m1clip.training.checkpoint import TrainState, checkpoint_tensors, restore, share_checkpoint
from m1clip.training.compose import TrainStep
from m1clip.training.distributed import RankLost, Ranks, needs_host_copy
from m1clip.training.inputs import RunInputs
from m1clip.training.muon import Muon
from m1clip.training.oom import OOMHandler, StepAttempts
from m1clip.training.step import compute_gradients, train_step
from m1clip.training.step_analyses import StepView, layer_grad_norms
from m1clip.training.transfer import Teacher
from m1clip.training.validation import encode
from m1clip.training.workbench import Workbench

TINY = {
    "model.patch_size": 16,
    "model.vision_width": 16,
    "model.text_width": 16,
    "model.vision_layers": 1,
    "model.text_layers": 1,
    "model.embed_dim": 8,
    "train.batch_size": 18,  # divided unevenly by 4
    "train.text_contrast": 0.0,
    "optim.optimizer": "adamw",
    "data.crop_min": 0.5,
}
CASES: dict[str, dict[str, Any]] = {
    **{name: {"train.loss": name, "optim.optimizer": "muon"} for name in LOSSES},
    **{f"{name} in micro-batches": {"train.loss": name, "train.micro_batch": 4} for name in LOSSES},
    "text-text": {"train.text_contrast": 0.3, "data.captions_per_step": 3},
    "cutmix": {"data.cutmix": 0.7, "train.batch_size": 20, "data.captions_per_step": 3},
    "cutmix in micro-batches": {
        **{"data.cutmix": 0.7, "train.batch_size": 20, "train.micro_batch": 3},
        **{"train.loss": "infonce", "train.text_contrast": 0.3, "data.captions_per_step": 3},
    },
    "distillation": {"train.text_contrast": 0.2, "teacher": True},
    "distillation of sigmoid": {"train.loss": "sigmoid", "teacher": True, "train.micro_batch": 3},
}
FROZEN = {"frozen": 0, "frozen in micro-batches": 4}  # with dropout; images at a time
# 20 steps with AdamW and with Muon, two of the others.
LONG = ("frozen", "multi-positive in micro-batches", "sigmoid")


def make(inputs: RunInputs, ranks: Ranks, changes: dict[str, Any]) -> tuple[RunInputs, TrainStep]:
    """A training step in float64."""
    changes = TINY | changes
    teacher = changes.pop("teacher", False)
    flat_names = {f"{section}.{key}": flat for flat, (section, key) in NAMES.items()}
    config = inputs.config.with_values(
        device="cpu", **{flat_names[name]: value for name, value in changes.items()}
    )
    training = dataclasses.replace(
        inputs.training,
        captions_per_image=config.data.captions_per_step or 1,
        plan=dataclasses.replace(inputs.training.plan, batch=config.train.batch_size),
        augmentation=dataclasses.replace(
            inputs.training.augmentation, cutmix=config.data.cutmix or 0.0
        ),
    )
    start = inputs.model.init.config
    start = dataclasses.replace(
        inputs.model.init,
        config=dataclasses.replace(start, logit_bias=LOSSES[config.train.loss].needs_bias),
    )
    inputs = dataclasses.replace(
        inputs,
        spec=dataclasses.replace(inputs.spec, config=config),
        training=training,
        model=inputs.model._replace(init=start),
    ).for_rank(ranks)
    if teacher:
        draw, captions = (
            np.random.default_rng(0),
            int(inputs.training.captions.caption_ids.max()) + 1,
        )
        images = inputs.training.plan.images
        image, text = (
            draw.normal(size=(count, 6)).astype(np.float16) for count in (images, captions)
        )
        inputs = dataclasses.replace(
            inputs, teacher=Teacher(image, np.arange(images), text, np.arange(captions), 2.0)
        )
    return inputs, double_step(inputs)


def double_step(inputs: RunInputs) -> TrainStep:
    torch.set_default_dtype(torch.float64)
    step = inputs.make_step()
    torch.set_default_dtype(torch.float32)
    model = step.model if step.parts.world.shards is not None else step.model.double()
    step.parts.encoder.encode_image = lambda pixels, *arguments: normalize(
        model.image_head(model.image_tower(pixels.double(), *arguments))
    )
    step.parts.encoder.encode_text = lambda tokens: normalize(
        model.text_head(model.text_tower(tokens))
    )
    step.parts.encoder.project_image = lambda features, *keys: normalize(
        model.image_head(features, *keys)
    )
    step.parts.encoder.project_text = lambda features, *keys: normalize(
        model.text_head(features, *keys)
    )
    muon = step.optimizer.parts.get("muon")
    if isinstance(muon, Muon):
        muon.dtype = torch.float64
    return step


def make_frozen(ranks: Ranks, folder: Path, micro_batch: int) -> tuple[RunInputs, TrainStep]:
    """The frozen recipe in float64, with dropout in both heads.

    Features are cached in the folder.
    """
    changes = {
        "train.batch_size": 18,
        "train.micro_batch": micro_batch,
        "data.captions_per_step": 2,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch_towers(patch)
        inputs = prepared(frozen_config(folder, **changes)).for_rank(ranks)
        step = double_step(inputs)
    assert step.parts.encoder.has_dropout
    assert inputs.training.image_features is not None
    return inputs, step


def train(ranks: Ranks, cases: list[str], folder: Path) -> dict[str, dict[str, Any]]:
    """For each case the ids of the batches, what steps report, the first gradient and the last weights."""
    result_of, common = {}, prepared(small_config(TINY))
    if ranks.size > 1:
        distributed.BUCKET_VALUES = 1000  # several for each tower
    for name in cases:
        if name in FROZEN:
            inputs, step = make_frozen(ranks, folder, FROZEN[name])
        else:
            inputs, step = make(common, ranks, CASES[name])
        batches = [inputs.training[number] for number in range(20 if name in LONG else 2)]
        compute_gradients(step.parts, batches[1], 1)
        gradients = {
            key: p.grad.clone() for key, p in step.model.named_parameters() if p.grad is not None
        }
        step.clear()
        results = [step.run(batch, number) for number, batch in enumerate(batches)]
        result_of[name] = {
            "ids": [batch.sample_ids for batch in batches],
            "views": [batch.views for batch in batches],
            "boxes": [batch.boxes for batch in batches],
            "gradients": gradients,
            "figures": figures_of(results),
            "weights": {key: p.detach() for key, p in step.model.named_parameters()},
        }
    return result_of


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def one_process(cache: Path) -> dict[str, dict[str, Any]]:
    return train(Ranks(), [*CASES, *FROZEN], cache)


def assert_close(actual: Tensor, expected: Tensor, subject: str) -> None:
    assert actual.dtype == expected.dtype
    difference = float((actual - expected).norm() / expected.norm().clamp(min=1e-9))
    assert difference < 1e-5, f"{subject}: relative difference {difference:.1e}"


@pytest.mark.parametrize(
    ("size", "cases"), [(2, [*CASES, *FROZEN]), (4, ["text-text", "multi-positive", "frozen"])]
)
def test_ranks_train_like_one_process(
    size: int, cases: list[str], one_process: dict[str, dict[str, Any]], cache: Path
) -> None:
    results = on_ranks(size, train, cases, cache)
    for name in cases:
        expected = one_process[name]
        for key in ("ids", "views", "boxes"):
            for step, whole in enumerate(expected[key]):
                if whole is None:  # features have no views, and most cases no boxes
                    continue
                assert torch.equal(
                    torch.cat([result[name][key][step] for result in results]), whole
                ), (name, key)
        for result in results:
            by_ranks = result[name]
            subject = f"{name}: losses, gradient norms and accuracies within the batch"
            assert_close(by_ranks["figures"], expected["figures"], subject)
            for key in ("gradients", "weights"):
                assert by_ranks[key].keys() == expected[key].keys()
                for parameter, value in expected[key].items():
                    assert_close(by_ranks[key][parameter], value, f"{name}: {key} of {parameter}")
            for parameter, value in results[0][name]["weights"].items():
                assert torch.equal(by_ranks["weights"][parameter], value), (
                    f"{name}: ranks differ in {parameter}"
                )


def test_ranks_that_would_separate_a_pair_of_cutmix_are_rejected() -> None:
    inputs = prepared(small_config(TINY | {"data.cutmix": 0.5}))
    with pytest.raises(UserError, match="2 ranks would separate some of a batch of 18"):
        inputs.for_rank(SeparateRank(rank=1, size=2))


class SeparateRank(Ranks):
    """One of several ranks, without the others."""

    def abort(self, message: str) -> NoReturn:
        raise UserError(message)


def both_paths(ranks: Ranks, cases: list[str], folder: Path) -> tuple[Any, Any, list[str], Tensor]:
    """Train with tensors exchanged as they are, and through host memory, as those of MPS."""
    direct = train(ranks, cases, folder)
    copied: list[str] = []

    def always(device_type: str) -> bool:
        copied.append(device_type)
        return True

    ranks.needs_host_copy = always
    ranks.host = None  # by gloo, as on several Macs
    through_host = train(ranks, cases, folder)
    received = ranks.exchange([torch.full((2,), float(ranks.rank))] * ranks.size, [2] * ranks.size)
    return direct, through_host, copied, torch.cat(received)


def test_host_copies_for_mps_give_the_same_bits(cache: Path) -> None:
    assert [kind for kind in ("cpu", "cuda", "mps") if needs_host_copy(kind)] == ["mps"]
    cases = ["multi-positive", "infonce in micro-batches"]
    for direct, through_host, copied, received in on_ranks(2, both_paths, cases, cache):
        assert copied, "nothing was copied"
        assert received.tolist() == [0.0, 0.0, 1.0, 1.0]
        for name in cases:
            assert torch.equal(direct[name]["figures"], through_host[name]["figures"])
            for key in ("gradients", "weights"):
                for parameter, value in direct[name][key].items():
                    assert torch.equal(through_host[name][key][parameter], value), (name, parameter)


def disturbances(ranks: Ranks) -> dict[str, Any]:
    """What rank 1 alone meets: too little memory, a result that is not finite.

    And what rank 0 alone reads.
    """
    distributed.BUCKET_VALUES = 1000
    inputs, step = make(prepared(small_config(TINY)), ranks, CASES["multi-positive"])
    results: dict[str, Any] = {}
    batch = inputs.training[0]
    encode_image, calls = step.parts.encoder.encode_image, [0]

    def fail(pixels: Tensor, *arguments: Tensor) -> Tensor:
        calls[0] += 1
        if ranks.rank == 1 and calls[0] <= 2:
            raise MemoryError if calls[0] == 1 else MemoryPressure("close to the limit", 10)
        return encode_image(pixels, *arguments)

    def fail_late(gradient: Tensor) -> None:
        """When other buckets of gradients are being exchanged."""
        late.remove()
        assert step.parts.world.exchange is not None
        results["sent"] = (step.parts.world.exchange._sent, len(step.parts.world.exchange.buckets))
        if ranks.rank == 1:
            raise MemoryError

    first_weight = next(iter(step.model.image_tower.parameters()))
    for kind in ("undisturbed", "memory", "late"):
        if kind == "late":
            late = first_weight.register_hook(fail_late)
        step.parts.encoder.encode_image = fail if kind == "memory" else encode_image
        without_update = dataclasses.replace(step.parts, update=step.parts.update.without_update())
        attempts = StepAttempts(clear=step.clear)
        attempts.handler = OOMHandler(0, lambda: 0)
        loss = attempts.repeat(partial(train_step, without_update), batch, 100).loss
        gradients = {
            key: p.grad.clone() for key, p in step.model.named_parameters() if p.grad is not None
        }
        results[kind] = loss, gradients, attempts.micro_batch
        step.clear()

    before = {key: p.detach().clone() for key, p in step.model.named_parameters()}
    step.parts.encoder.encode_image = lambda pixels, *arguments: (
        encode_image(pixels, *arguments) * (float("nan") if ranks.rank == 1 else 1.0)
    )
    loss = step.run(batch, 0).loss
    unchanged = all(torch.equal(p, before[key]) for key, p in step.model.named_parameters())
    results["not finite"] = bool(loss.isfinite()), unchanged

    step.parts.encoder.encode_image = encode_image
    step.run(batch, 0)
    groups = checkpoint_tensors(step)
    shared = share_checkpoint(step, lambda device: (TrainState(step=7), groups))
    assert shared is not None
    restore(step, shared[0], shared[1])
    results["checkpoint"] = shared
    results["bandwidth"] = ranks.bandwidth(torch.device("cpu"))
    results["features"] = encode(inputs, step.model.float(), "val")
    results["too many ranks"] = encode(inputs, step.model, "val", 1)
    return results


def test_memory_nan_checkpoints_and_evaluation_of_all_ranks() -> None:
    first, second = on_ranks(2, disturbances)
    for result in (first, second):
        assert result["undisturbed"][2] == 0
        assert result["memory"][2] == 5, (
            "the failed attempt halves the 9 images of each rank; the second is repeated"
        )
        assert result["late"][2] == 5
        sent, buckets = result["sent"]
        assert 0 < sent < buckets - 1, "the backward pass and exchanges overlap"
        for kind in ("memory", "late"):
            assert_close(result[kind][0], result["undisturbed"][0], "loss")
            for name, gradient in result["undisturbed"][1].items():
                assert_close(result[kind][1][name], gradient, name)
        assert result["not finite"] == (False, True)
        assert result["bandwidth"] > 0
        assert result["checkpoint"][0].step == 7
    for group, tensors in first["checkpoint"][1].items():
        assert all(
            torch.equal(second["checkpoint"][1][group][name], tensor)
            for name, tensor in tensors.items()
        )
    alone = prepared(small_config(TINY))
    model = alone.make_step().model
    restored = first["checkpoint"][1]["weights"]
    model.load_state_dict(restored, strict=False)
    features_alone = encode(alone, model, "val")
    for result in (first, second):
        for ours, expected in zip(result["features"][:4], features_alone[:4], strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
        assert len(result["too many ranks"].image) == 1


SHARDED: dict[str, dict[str, Any]] = {
    "in one pass": {"train.text_contrast": 0.3, "data.captions_per_step": 3},
    "in micro-batches": {"train.micro_batch": 8},  # two on rank 0, one on rank 1
    "with activation checkpointing": {"model.grad_checkpointing": True, "train.loss": "sigmoid"},
    **{f"with {name}": {"optim.optimizer": name} for name in OPTIMIZERS},
}


def shard(ranks: Ranks) -> dict[str, Any]:
    """Checkpoints after some steps, with and without sharding.

    Then each continues from that of the other.
    """
    common, results_of = (
        prepared(small_config({**TINY, "model.vision_layers": 2, "train.batch_size": 17})),
        dict[str, Any](),
    )
    for name, changes in SHARDED.items():
        settings = {"optim.optimizer": "muon", "train.batch_size": 17, **changes}
        made = [make(common, ranks, {**settings, "train.fsdp": shard}) for shard in ("on", "off")]
        inputs, steps = made[0][0], [step for _, step in made]
        assert steps[0].parts.world.shards is not None
        rows = [
            len(rows)
            for key, rows in steps[0].parts.world.shards.local.items()
            if "blocks.0.attn.qkv.weight" in key
        ]
        results = []
        norms: list[dict[str, Any]] = []

        def probe(view: StepView, norms: list[dict[str, Any]] = norms) -> None:
            weights = view.norms(view.weights, view.layers)
            norms.append({"gradients": layer_grad_norms(view), "weights": weights})

        for step in steps:
            three = [step.run(inputs.training[n], n, probe if n == 2 else None) for n in range(3)]
            results.append(figures_of(three))
        state = TrainState(step=3)
        saved = [copy.deepcopy(checkpoint_tensors(step)) for step in steps]
        for step, groups in zip(steps, reversed(saved), strict=True):
            loaded = share_checkpoint(
                step, lambda device, groups=groups, state=state: (state, copy.deepcopy(groups))
            )
            assert loaded is not None
            restore(step, *loaded)
        later = [figures_of([step.run(inputs.training[3], 3)]) for step in steps]
        weights = [made[0][0].complete_model(step).state_dict() for step in steps]
        results_of[name] = {
            "rows": rows,
            "results": results,
            "norms": norms,
            "saved": saved,
            "later": later,
            "weights": weights,
        }
    return results_of


def test_sharded_weights_train_like_complete_ones() -> None:
    first, second = on_ranks(2, shard)
    for name in SHARDED:
        for result in (first[name], second[name]):
            assert result["rows"] == [24, 24], "half of the 48 rows of each tower's matrix"
            assert_close(*result["results"], f"{name}: losses and gradient norms")
            sharded, complete = result["norms"]
            for kind in ("gradients", "weights"):
                assert sharded[kind] == pytest.approx(complete[kind], rel=2e-5), f"{name}: {kind}"
            assert len(complete["gradients"]) == 10, "input, 2 or 1 blocks, output, head; scale"
            total = math.hypot(*complete["gradients"].values())
            assert total == pytest.approx(float(result["results"][1][2, 1]), rel=1e-4)
            assert_close(*result["later"], f"{name}: after continuing from the other's checkpoint")
            for key, value in result["weights"][1].items():
                assert_close(result["weights"][0][key].to(value.dtype), value, f"{name}: {key}")
        sharded, complete = first[name]["saved"]
        assert second[name]["saved"][0] == {"weights": {}, "optimizer": {}}, (
            "rank 0 alone has the complete tensors"
        )
        for group, tensors in complete.items():
            assert sharded[group].keys() == tensors.keys()
            for key, value in tensors.items():
                assert_close(sharded[group][key], value, f"{name}: {key}")


def bf16_gradients(ranks: Ranks) -> list[tuple[Tensor, Tensor]]:
    """Loss and gradient in bf16 with and without sharding, and in fp32."""
    common, gradients = prepared(small_config({**TINY, "model.vision_layers": 2})), []
    for precision, shard in (("bf16", "on"), ("bf16", "off"), ("fp32", "off")):
        config = common.config.with_values(precision=precision, fsdp=shard)
        spec = dataclasses.replace(common.spec, config=config)
        inputs = dataclasses.replace(common, spec=spec).for_rank(ranks)
        step = inputs.make_step()
        loss = compute_gradients(step.parts, inputs.training[0], 0)
        local = {} if step.parts.world.shards is None else step.parts.world.shards.local
        rows = {name: local.get(name, p).grad for name, p in step.model.named_parameters()}
        rows = {name: grad for name, grad in rows.items() if grad is not None}
        whole = (
            rows
            if step.parts.world.shards is None
            else step.parts.world.shards.complete(rows, on_all_ranks=True)
        )
        gradients.append((loss, torch.cat([whole[name].flatten() for name in sorted(whole)])))
    return gradients


def test_sharded_bf16_is_as_close_to_fp32_as_unsharded_bf16() -> None:
    for (sharded_loss, sharded), (loss, unsharded), (wanted_loss, expected) in on_ranks(
        2, bf16_gradients
    ):
        assert float((sharded_loss / wanted_loss - 1).abs()) < 0.02
        errors = [
            float((gradient - expected).norm() / expected.norm())
            for gradient in (sharded, unsharded)
        ]
        assert all(1e-4 < error < 0.05 for error in errors), (errors, "not equal: bf16 rounds")
        assert float((sharded_loss / loss - 1).abs()) < 0.02


@pytest.mark.parametrize(("total", "fits"), [(10**4, False), (10**12, True)])
def test_predicted_memory_decides_whether_a_step_fits_one_gpu(
    total: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    workbench = Workbench()
    card = SimpleNamespace(kind="cuda", name="cuda", total_bytes=lambda: total)
    monkeypatch.setattr(workbench, "_device", lambda config: card)
    assert workbench._fits_one_gpu(small_config(TINY), 9) == fits


def phases_while_waiting(ranks: Ranks) -> list[str]:
    """The phase in which a rank waits for the others."""
    inputs, step = make(prepared(small_config(TINY)), ranks, {})
    gather, phases = Ranks.gather, list[str]()

    def watched(self: Ranks, *args: Any) -> Tensor:
        phases.append(step.phases._marks[-1][0])
        return gather(self, *args)

    Ranks.gather = watched  # type: ignore[method-assign]
    step.run(inputs.training[0], 0)
    return phases


def test_waiting_for_slower_ranks_is_no_work() -> None:
    """Otherwise all ranks would seem equally slow."""
    for phases in on_ranks(2, phases_while_waiting):
        assert set(phases) == {"exchange"}


def test_torchrun_passes_every_option_on(capfd: pytest.CaptureFixture[str]) -> None:
    """Its parser also looks at the words behind the module, and rejects what abbreviates two of its options."""
    parser = get_args_parser()
    rejected = []
    for name in (*NAMES, "out", "resume", "preset", "config", "background"):
        words = ["m1clip", "train", f"--{name.replace('_', '-')}", "x"]
        try:
            parsed = parser.parse_args(["--nproc-per-node", "2", "-m", *words])
        except SystemExit:
            rejected.append(name)
        else:
            assert [parsed.training_script, *parsed.training_script_args] == words
            assert parsed.nproc_per_node == "2"
    assert rejected == []


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]


@pytest.mark.slow
def test_torchrun_needs_no_separator(tmp_path: Path) -> None:
    words = ["-m", "m1clip", "train", *small_arguments({"train.steps": 1}), "--out", "run"]
    done = subprocess.run(
        [*TORCHRUN, *words],
        cwd=tmp_path,
        env=environment(),
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "best" / "model.safetensors").is_file()


@pytest.mark.slow
def test_report_of_torchrun_ends_with_the_error_of_the_user(tmp_path: Path) -> None:
    done = subprocess.run(
        [*TORCHRUN, "-m", "m1clip", "train", "missing", "--device", "cpu"],
        cwd=tmp_path,
        env=environment(),
        check=False,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 1
    *_, last, line = done.stderr.splitlines()
    assert set(line) == {"="}
    assert last.endswith("m1clip: missing: no such file or folder")


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("Timed out waiting 10000ms for recv operation to complete", "did not answer for 10 s"),
        ("Application timeout caused pair closure", "did not answer for 10 s"),
        ("Connection closed by peer", "has ended"),
    ],
)
def test_lost_rank_is_named_with_the_reason(message: str, reason: str) -> None:
    store = dist.HashStore()
    ranks = Ranks(0, 2, store, ("process 1 on a", "process 2 on b"), timeout=10)
    with mock.patch.object(distributed, "REPORT_SECONDS", 0.1):
        error = ranks.lost(RuntimeError(message))
    assert str(error).startswith(f"rank 1 (process 2 on b) {reason}; ")


def test_one_rank_reports_a_lost_one_however_late_the_others_notice() -> None:
    store = dist.HashStore()
    names = ("process 1 on a", "process 2 on a", "process 3 on a")
    with mock.patch.object(distributed, "REPORT_SECONDS", 0.0):
        first = Ranks(2, 3, store, names)
        assert isinstance(first.lost(RuntimeError("Connection closed by peer")), RankLost)
        late = Ranks(1, 3, store, names).lost(RuntimeError("Connection closed by peer"))
        assert isinstance(late, SystemExit)
        again = first.lost(RuntimeError("Connection closed by peer"))
    assert isinstance(again, RankLost), (
        "a later exchange of the same rank fails with the same error"
    )


def test_rank_in_a_slow_step_is_not_reported_as_lost() -> None:
    """Rank 2 arrives after eight seconds, because steps take that long; rank 0 has ended."""
    store = dist.HashStore()
    seconds = [0.0]

    def clock() -> float:
        return seconds[0]

    def sleep(duration: float) -> None:
        seconds[0] += duration
        if seconds[0] >= 8:
            store.set("lost/2", "")

    ranks = Ranks(1, 3, store, ("process 1 on a", "process 2 on a", "process 3 on a"))
    with (
        mock.patch.object(distributed.time, "monotonic", clock),
        mock.patch.object(distributed.time, "sleep", sleep),
    ):
        with ranks._watched():
            pass
        seconds[0] = 4.0
        with ranks._watched():
            pass
        seconds[0] = 0.0
        error = ranks.lost(RuntimeError("Connection closed by peer"))
    assert str(error).startswith("rank 0 (process 1 on a) has ended; ")
