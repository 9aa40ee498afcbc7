"""The product's own training step, opened for one candidate after another, and what can be asked of it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import psutil
import torch
from torch import Tensor

from m1clip.bench.candidate import PROBE_PAIRS, Candidate, config_of, with_batch
from m1clip.data.cache import DecodePlan
from m1clip.data.loader import Batch, BatchPlan, TrainingSet
from m1clip.errors import UserError
from m1clip.hardware.device import Device, Precision, available, check_compile, choose_precision, threads
from m1clip.hardware.energy import EnergyMeter, open_meter, temperature
from m1clip.hardware.facts import Facts
from m1clip.hardware.measure import DTYPES, copies, copy_bandwidth, first_compile, gemm_rate, overheads, small_matmul
from m1clip.hardware.precision import autocast
from m1clip.hardware.timing import Load
from m1clip.model.clip import CLIP
from m1clip.model.presets import flops_per_pair
from m1clip.training.memory import warm_process, watched
from m1clip.training.parity import few, relative_difference
from m1clip.training.setup import Job, prepare_scratch
from m1clip.training.step import TrainStep


class HybridClip(CLIP):
    """A CLIP whose towers live on two devices; a step of it is the same step."""

    text_first = False  # the accelerator gets its work, and computes while the CPU does the rest

    @classmethod
    def placed(cls, model: CLIP, accelerator: torch.device) -> HybridClip:
        """Turn a model into a hybrid one, in place: its text half moves to the CPU, the rest to the accelerator."""
        model.to(accelerator)
        model.text.to("cpu")
        model.text_projection.to("cpu")
        model.__class__ = cls
        assert isinstance(model, cls)
        return model

    def encode_text(self, ids: Tensor) -> Tensor:
        """On the CPU, while the accelerator works through the image tower that was queued before.

        Going back, autograd has one thread a device, so the two towers overlap there too.
        """
        return super().encode_text(ids).to(self.logit_scale.device)


class HybridBatch(Batch):
    """A batch whose tokens stay on the host: fetching them back would wait for the image tower."""

    @classmethod
    def of(cls, batch: Batch) -> HybridBatch:
        """The same batch with this rule."""
        return cls(**vars(batch))

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """All but the tokens on a device."""
        return replace(super().to(device, non_blocking), tokens=self.tokens)


def hybrid_autocast(kind: str, precision: Precision) -> Callable[[], AbstractContextManager[object]]:
    """The same precision on both devices."""
    if precision == "fp32":
        return contextlib.nullcontext

    @contextlib.contextmanager
    def both():  # type: ignore[no-untyped-def]
        with torch.autocast(kind, dtype=DTYPES[precision]), torch.autocast("cpu", dtype=DTYPES[precision]):
            yield

    return both


WARMUP, TOTAL_STEPS = 100, 10_000  # the schedule of a long run: its first steps move the weights very little
SETTLING = 24  # steps at most
PARITY_FLOPS = 2e12  # the CPU must get through the reference in a few seconds


class Workload:
    """One open candidate. Opening another one of the same model keeps its data and weights."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.process_bytes = warm_process(facts)
        self._job: Job | None = None
        self._model: CLIP | None = None
        self.data_bytes = 0
        self.peak_is_known = True

    def open(self, candidate: Candidate, images: int) -> dict[str, Any]:
        """Build the step of a candidate and make its first, cold step."""
        self._close()
        kind: Any = candidate.device if candidate.device != "hybrid" else available(self.facts)[0]
        self.device = Device(kind, self.facts)
        if candidate.compile:
            check_compile(kind)
        precision = choose_precision(candidate.precision, kind, self.facts, None)
        torch.set_num_threads(threads(candidate.threads, self.facts))
        job = self._job_of(candidate, images, precision)
        first_of_process = self._model is None
        self.peak_is_known = self.device.reset_peak() or first_of_process
        if self._model is None or self._model.shape != job.shape:
            self._model = self._build(job, candidate)
        self._model.set_attention(*[candidate.attention] * 2)  # type: ignore[arg-type]
        self._model.set_recompute(candidate.recompute)
        context = job.autocast if candidate.device != "hybrid" else hybrid_autocast(kind, precision)
        self.job, self.candidate, self._next = job, candidate, 0
        self.update = TrainStep(self._model, job.config, self.device, precision, job.preprocess, context)
        self.meter: EnergyMeter | None = open_meter(kind)
        begin = time.perf_counter()
        loss = self._step(self._batch())
        self.device.synchronize()
        first = time.perf_counter() - begin
        self._settle()
        groups = self._batch().text_groups()
        work = sum(len(group) * flops_per_pair(job.shape, group.shape[1]) for group in groups)
        return {
            "parameters": sum(p.numel() for p in self._model.parameters()),
            "text_tokens": sum(group.numel() for group in groups) / candidate.batch,
            "flops": work,
            "first_step_seconds": first,
            "replayed": self._is_replayed(),
            "threads": torch.get_num_threads(),
            "first_loss": float(loss),
            "meter": self.meter.name if self.meter else None,
        }

    def steps(self, count: int, seconds: float) -> dict[str, Any]:
        """Timed steps, synchronised one by one; stops after `seconds` once there is one."""
        self.update.phases.take()
        samples, begin = [], time.perf_counter()
        joules = self.meter.joules() if self.meter else 0.0
        load = Load()
        for _ in range(count):
            start = time.perf_counter()
            batch = self._batch()
            data = time.perf_counter() - start
            self._step(batch)
            self.device.synchronize()
            total = time.perf_counter() - start
            self.device.memory_bytes()  # lets a device without a peak counter see it
            samples.append({"seconds": total, "data": data, **self.update.phases.take()})
            if time.perf_counter() - begin > seconds:
                break
        used = self.meter.joules() - joules if self.meter else None
        heat = temperature(self.device.kind)
        return {"samples": samples, "joules": used, "others": load.others(), "temperature": heat}

    def memory(self) -> dict[str, Any]:
        """The peak so far, and one more step watched to say what it was made of. Adds up to the total."""
        total = self.device.peak_bytes()
        parts = {"process": self.process_bytes, "data": self.data_bytes} if self._on_host() else {}
        if not self.candidate.compile:  # compiled code hides its tensors
            parts |= watched(self.update, self._batch(), self._plainly)
        rest = total - sum(parts.values())
        return {"total": total, "parts": {**parts, "rest": rest}, "known": self.peak_is_known and rest >= 0}

    def parity(self) -> dict[str, Any]:
        """The same few samples here and on the CPU in fp32: how far loss and gradients are apart."""
        samples = max(2, min(self.candidate.batch, int(PARITY_FLOPS / flops_per_pair(self.job.shape, 77)), 8))
        batch = few(self.job.training[0], samples)
        here = HybridBatch.of(batch) if self.candidate.device == "hybrid" else batch
        loss, grads = _gradient(self.update, here)
        plain = copy.deepcopy(self._clip()).to("cpu")
        plain.__class__ = CLIP
        plain.set_attention("bmm", "bmm")
        plain.set_recompute(False)
        host = Device("cpu", self.facts)
        config = dataclasses.replace(self.job.config, model=dataclasses.replace(self.job.config.model, compile=False))
        reference = TrainStep(plain, config, host, "fp32", self.job.preprocess, nullcontext)
        true_loss, true_grads = _gradient(reference, batch)
        return {
            "samples": samples,
            "loss_difference": abs(loss - true_loss) / max(abs(true_loss), 1e-12),
            "gradient_difference": relative_difference(grads, true_grads),
        }

    def _job_of(self, candidate: Candidate, images: int, precision: Any) -> Job:
        """The data and tokenizer of a model are made once; the rest follows the candidate."""
        if self._job is None or self._job.config.model.preset != candidate.model:
            self._model = None
            before = _rss()
            wanted = config_of(candidate, max(images, 2 * candidate.batch, PROBE_PAIRS))
            self._job = prepare_scratch(wanted, lambda line: None, self._decode)
            self.data_bytes = max(0, _rss() - before)
        job = self._job
        wanted = with_batch(config_of(candidate, images), candidate.batch)
        kind: Any = candidate.attention
        model = dataclasses.replace(
            job.config.model, recompute=candidate.recompute, compile=candidate.compile, graph=candidate.graph,
            attention_image=kind, attention_text=kind,
        )  # fmt: skip
        config = dataclasses.replace(job.config, model=model, optim=wanted.optim, train=wanted.train)
        plan = BatchPlan(len(job.splits["train"].samples), wanted.train.batch or 2, config.seed)
        old = job.training
        fixed = self.device.rules.fixed_shapes or candidate.compile
        train, there = job.splits["train"].images, None
        if self.device.rules.resident and candidate.device != "hybrid":
            there = train.to_device(self.device.torch, self.device.free_bytes())
        training = TrainingSet(
            train, old.captions, plan, old.augmentation, device_images=there, full_length=fixed, identity=old.identity
        )
        context = autocast(self.device, precision)
        return dataclasses.replace(
            job, config=config, device=self.device, precision=precision, training=training, autocast=context
        )

    def _build(self, job: Job, candidate: Candidate) -> CLIP:
        model = job.build_model()
        return HybridClip.placed(model, self.device.torch) if candidate.device == "hybrid" else model

    def _decode(self, facts: Facts) -> DecodePlan:
        return DecodePlan(
            1, "spawn", facts.memory_bytes, lambda title: nullcontext(lambda done, total: None), lambda line: None
        )

    def _clip(self) -> CLIP:
        assert self._model is not None, "no candidate is open"
        return self._model

    def _on_host(self) -> bool:
        return self.device.kind == "cpu"

    def _batch(self) -> Batch:
        batch = self.job.training[self._next % max(1, self.job.training.plan.steps_per_epoch)]
        batch = batch if self.candidate.batch > 1 else few(batch, 1)
        return HybridBatch.of(batch) if self.candidate.device == "hybrid" else batch

    def _step(self, batch: Batch) -> Tensor:
        self._next += 1
        return self.update(batch, self._next)[0]

    def _settle(self) -> None:
        """Steps until one is recorded for replay: texts grow at first, and each time a recording is made anew."""
        captured = self.update.cuda_graph
        for _ in range(SETTLING if captured is not None else 0):
            if captured is not None and captured.settled:
                break
            self._step(self._batch())

    def _is_replayed(self) -> bool:
        captured = self.update.cuda_graph
        return captured is not None and captured.settled and not captured.off

    def _plainly(self, batch: Batch) -> Tensor:
        """A step kernel by kernel: a replayed one shows nothing of its tensors."""
        self._next += 1
        return self.update.eager(batch, self._next)[0]

    def _close(self) -> None:
        if hasattr(self, "update"):
            self.update.optimizer.zero_grad()
            del self.update
        gc.collect()
        torch.compiler.reset()


def _gradient(update: TrainStep, batch: Batch) -> tuple[float, Tensor]:
    """Loss and the whole gradient as one float32 vector, by the step's own backward pass."""
    update.optimizer.zero_grad()
    loss = float(update.backward(batch.to(update.device.torch), 0))
    parts = [p.grad.detach().float().cpu().flatten() for p in update.model.parameters() if p.grad is not None]
    update.optimizer.zero_grad()
    scale = update.scaler.get_scale() if update.scaler is not None else 1.0  # fp16's gradients are scaled up
    return loss, torch.cat(parts) / scale


def _rss() -> int:
    return int(psutil.Process().memory_info().rss)


GEMM_SIZE = {"cpu": 1536, "mps": 4096, "cuda": 8192}  # large enough to reach the device's rate


def probe_device(
    kind: Any, facts: Facts, precisions: list[Any], compile: bool, seconds: float = 30.0
) -> dict[str, Any]:
    """Everything about a device that needs no model; a busy machine gets fewer rounds, and no compiling last."""
    begin = time.monotonic()
    device = Device(kind, facts)
    torch.set_num_threads(threads(0, facts))
    found: dict[str, Any] = {
        "device": kind,
        "name": facts.cuda if kind == "cuda" else facts.cpu,
        "threads": torch.get_num_threads(),
        "memory_bytes": device.total_bytes(),
        "gemm": {name: gemm_rate(device, name, GEMM_SIZE[kind], rounds=5) for name in precisions},
        "overheads": overheads(device, rounds=9),
        "small_matmul": small_matmul(device, rounds=5),
        "bandwidth": copy_bandwidth(device, rounds=5),
        "copies": copies(device) if kind != "cpu" else [],
    }
    late = time.monotonic() - begin > seconds
    obstacle = "no time left for it" if late else compile_obstacle(kind) if compile else "not asked for"
    found["compile_obstacle"] = obstacle
    found["first_compile_seconds"] = None if obstacle else first_compile(device)
    return found


def compile_obstacle(kind: str) -> str:
    """Why torch.compile cannot be tried on a device; empty when it can."""
    try:
        check_compile(kind)
    except UserError as error:
        return str(error)
    return ""
