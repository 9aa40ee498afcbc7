"""m1clip plan: memory, time and energy of a job before it is started, on one machine and on several."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from m1clip.bench.candidate import Candidate, config_of, recall, text_config
from m1clip.bench.verdict import Point, fit
from m1clip.config import Config
from m1clip.data.cache import RAM_LIMIT_SHARE
from m1clip.data.captions import tokenise
from m1clip.data.synthetic.source import SyntheticSource
from m1clip.errors import UserError
from m1clip.formatting import amount
from m1clip.hardware.device import Device, choose_device, choose_precision, threads
from m1clip.hardware.facts import Facts, read_facts
from m1clip.hardware.measure import bf16_speedup, gemm_rate
from m1clip.model.clip import count_parameters
from m1clip.model.presets import ClipShape, flops_per_pair, shape_of
from m1clip.text.tokenizers import make_tokenizer
from m1clip.training.memory import forecast, foretold_peak, tensor_limit, tracer, warm_process

ASSUMED_SHARE = 0.5  # of the matrix product rate, where nothing was measured: said in the plan
OPTIMIZER_BYTES = 28  # AdamW reads weight, gradient and two moments, writes three of them
MOST_BATCH = 65_536
CAPTIONS = 64  # synthetic images, for the usual length of a caption


@dataclass(frozen=True, kw_only=True)
class PlanAsk:
    """A job to plan."""

    model: str = "tiny"
    batch: int = 64
    images: int = 8000
    epochs: float = 10.0
    device: str = "auto"
    precision: str = "auto"
    optimizer: str = "muon"
    text_tokens: int | None = None
    rate: str | None = None
    bandwidth: str | None = None
    network: str = "1GB"
    watts: float | None = None
    memory: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("batch", 2), ("images", 2), ("epochs", 1e-9)):
            if not getattr(self, name) >= least:
                raise UserError(f"--{name} must be at least {least:g}, not {getattr(self, name):g}")


def make_plan(ask: PlanAsk) -> dict[str, Any]:
    """Everything about a job that can be known without running it."""
    rate = amount(ask.rate, "FLOP", "--rate") if ask.rate else None  # what cannot be read is said first
    bandwidth = amount(ask.bandwidth, "B", "--bandwidth") if ask.bandwidth else None
    network, asked_memory = amount(ask.network, "B", "--network"), amount(ask.memory or "1B", "B", "--memory")
    facts = read_facts()
    torch.set_num_threads(threads(0, facts))
    device = Device(choose_device(ask.device, facts), facts)
    measure = ask.precision == "auto" and device.rules.bf16 == "measure"
    speedup = bf16_speedup(device) if measure else None
    precision = choose_precision(ask.precision, device.kind, facts, speedup)
    candidate = Candidate(model=ask.model, batch=ask.batch, device=device.kind, precision=precision,
                          attention="bmm" if device.kind == "cpu" else "sdpa", optimizer=ask.optimizer)  # fmt: skip
    config = config_of(candidate, 64)
    vocabulary, usual = caption_shape(ask.model)
    shape = shape_of(config.model, vocabulary)
    tokens = min(ask.text_tokens or usual, shape.context_length)
    limit = asked_memory if ask.memory else float(device.total_bytes())
    memory = plan_memory(
        config, shape, device, precision, facts, ask.batch, tokens, data_bytes(ask, shape, facts.memory_bytes), limit
    )

    parameters, per_pair = count_parameters(shape), flops_per_pair(shape, tokens)
    step, basis, joules = step_time(candidate, facts, device, parameters, per_pair * ask.batch, rate, bandwidth)
    steps = max(1, round(ask.epochs * ask.images / ask.batch))
    return {
        "job": {"model": ask.model, "parameters": parameters, "flops_per_pair": per_pair, "text_tokens": tokens,
                "batch": ask.batch, "device": device.kind, "precision": precision, "optimizer": ask.optimizer},
        "memory": memory,
        "step_seconds": step,
        "basis": basis,
        "steps": steps,
        "seconds": steps * step,
        "energy": energy_words(joules, ask.watts, step, steps),
        "gradient_bytes": 4 * parameters,
        "network": network,
        "machines": [on_machines(count, step, steps, 4 * parameters, network) for count in (1, 2, 4, 8)],
    }  # fmt: skip


def plan_memory(
    config: Config, shape: ClipShape, device: Device, precision: Any, facts: Facts, batch: int, tokens: int, data: int,
    limit: float,
) -> dict[str, Any]:  # fmt: skip
    """Memory by component at a batch, whether it fits, and the largest batches that would."""
    process = warm_process(facts) if device.kind == "cpu" else 0
    trace = tracer(config, shape, device.kind, precision, facts, tokens)
    parts = foretold_peak(trace(batch), device.kind, process, data)
    total = sum(parts.values())
    frugal = dataclasses.replace(config, model=dataclasses.replace(config.model, recompute=True))
    again = tracer(frugal, shape, device.kind, precision, facts, tokens)

    room = tensor_limit(limit, device.kind, process, data)
    plain = forecast(trace)
    least = forecast(again, plain)

    return {"parts": parts, "total": total, "limit": limit, "fits": total <= limit,
            "largest_batch": plain.largest(room, MOST_BATCH),
            "largest_batch_recompute": least.largest(room, MOST_BATCH)}  # fmt: skip


def step_time(
    candidate: Candidate, facts: Facts, device: Device, parameters: int, flops: float, rate: float | None,
    bandwidth: float | None,
) -> tuple[float, str, float | None]:  # fmt: skip
    """Seconds of a step, where they come from in words, and joules of a step if a meter has told."""
    if rate is not None:
        seconds = flops / (rate * ASSUMED_SHARE)
        words = f"{ASSUMED_SHARE:.0%} of the given {rate / 1e12:.3g} TFLOP/s, assumed"
        if bandwidth is not None:
            seconds += OPTIMIZER_BYTES * parameters / bandwidth
            words += f", and the optimizer at {bandwidth / 1e9:.3g} GB/s"
        return seconds, words, None
    mine = [item for item in recall(facts) if _same_way(item["candidate"], candidate)]
    exact = [item for item in mine if item["candidate"]["model"] == candidate.model]
    if exact:
        near = min(exact, key=lambda item: abs(item["candidate"]["batch"] - candidate.batch))
        scale = flops / near["flops"]
        joules = near["joules_per_step"] * scale if near["joules_per_step"] is not None else None
        return near["seconds"] * scale, f"measured here at batch {near['candidate']['batch']}", joules
    points = [Point(i["candidate"]["model"], i["parameters"], i["flops"], i["seconds"]) for i in mine]
    model = fit(points) if len(points) >= 3 else None
    if model is not None:
        return model.seconds(parameters, flops), f"cost model of {len(points)} steps measured here", None
    rate = gemm_rate(device, candidate.precision, 1536 if device.kind == "cpu" else 8192)  # type: ignore[arg-type]
    words = f"{ASSUMED_SHARE:.0%} of the measured {rate / 1e12:.3g} TFLOP/s, assumed; m1clip compare measures it"
    return flops / (rate * ASSUMED_SHARE), words, None


def on_machines(count: int, step: float, steps: int, gradient: int, network: float) -> dict[str, Any]:
    """The same epochs on several machines, each with the whole batch; a ring moves each gradient nearly twice."""
    traffic = 2 * (count - 1) / count * gradient
    seconds = steps / count * (step + traffic / network)
    return {"machines": count, "seconds": seconds, "speedup": steps * step / seconds, "traffic_bytes": traffic}


def energy_words(joules: float | None, watts: float | None, step: float, steps: int) -> str:
    """Watt-hours from a meter or from the power given; never guessed."""
    if joules is not None:
        return f"{joules * steps / 3600:.3g} Wh (a meter's joules a step, measured here by m1clip compare)"
    if watts is not None:
        return f"{watts * step * steps / 3600:.3g} Wh at the given {watts:g} W"
    return "not measured (no meter was read here; --watts gives the power)"


def data_bytes(ask: PlanAsk, shape: ClipShape, memory: int) -> int:
    """Images that train keeps in memory as bytes; a larger set stays on disk."""
    needed = ask.images * shape.image_size**2 * 3
    return needed if needed <= RAM_LIMIT_SHARE * memory else 0


def caption_shape(model: str) -> tuple[int | None, int]:
    """(vocabulary, tokens of the longest caption in a batch, rounded up to 8) of the synthetic captions."""
    text = text_config(model)
    draft = shape_of(config_of(Candidate(model=model, batch=2, device="cpu", precision="fp32"), 64).model)
    captions = [c for sample in SyntheticSource(32, CAPTIONS, 1, 1, seed=0).samples("train") for c in sample.captions]
    tokenizer = make_tokenizer(text.tokenizer, captions, text.alphabet)
    lengths = tokenise([tuple(captions)], tokenizer, draft.context_length).lengths
    return tokenizer.vocab_size, min(-(-int(lengths.max()) // 8) * 8, draft.context_length)


def _same_way(known: dict[str, Any], candidate: Candidate) -> bool:
    keys = ("device", "precision", "optimizer", "compile", "recompute", "threads")
    mine = candidate.to_dict()
    return all(known.get(key) == mine[key] for key in keys)
