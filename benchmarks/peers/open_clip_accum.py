"""open_clip's --accum-freq: its gradients, its work and its time. Runs in a Python that has open_clip.

Argument: a JSON file with the job (shape, batch, chunk, text tokens, threads). Each line on
standard input is a JSON object: {"do": "versions"}, {"do": "gradients"}, {"do": "step", "accum": K}
or {"do": "peak"}; each gets one line back. Every step is made by open_clip's own `train_one_epoch`.
"""

from __future__ import annotations

import json
import logging
import resource
import sys
import time
from types import SimpleNamespace
from typing import Any

import torch
import torchvision_ops  # noqa: F401  first: open_clip imports torchvision

# isort: split
import open_clip
from open_clip.loss import ClipLoss
from open_clip_train.train import train_one_epoch
from steps import open_clip_model
from torch import Tensor, nn


class Loader:
    """The parts of one batch, as open_clip's loop takes them."""

    def __init__(self, images: Tensor, texts: Tensor, accum: int) -> None:
        self.parts = list(zip(images.chunk(accum), texts.chunk(accum), strict=True))
        self.num_batches, self.num_samples = len(self.parts), len(images)

    def __iter__(self) -> Any:
        return iter(self.parts)


class Keep(torch.optim.SGD):
    """Keeps the gradients that it is given and moves nothing."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Copy instead of moving."""
        self.kept = [p.grad.clone() for group in self.param_groups for p in group["params"]]


class CountedLoss(ClipLoss):
    """open_clip's loss, which counts how often it is asked."""

    requested = 0

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """One more loss over all features."""
        self.requested += 1
        return super().forward(*inputs, **named)


def step(
    model: nn.Module, optimizer: Any, batch: tuple[Tensor, Tensor], accum: int, precision: str
) -> CountedLoss:
    """One update with the batch in `accum` parts."""
    loader, loss = Loader(*batch, accum), CountedLoss()
    data = {"train": SimpleNamespace(dataloader=loader, set_epoch=lambda epoch: None)}
    options = SimpleNamespace(
        device="cpu", precision=precision, distill=False, accum_freq=accum, skip_scheduler=True, horovod=False,
        grad_clip_norm=None, log_every_n_steps=1, rank=0, world_size=1, batch_size=len(batch[0]) // accum,
        wandb=False, distributed=False,
    )  # fmt: skip
    train_one_epoch(model, data, loss, 0, optimizer, None, None, None, options)
    return loss


def gradients(model: nn.Module, batch: tuple[Tensor, Tensor], accum: int) -> dict[str, Any]:
    """fp32 gradients with accumulation against those of one pass over the same batch, and the work for them."""
    keep = Keep(model.parameters(), lr=1.0)
    names = [name for name, _ in model.named_parameters()]
    rows = 0

    def count(module: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> None:
        nonlocal rows
        rows += len(inputs[0])

    hook = model.visual.register_forward_hook(count)  # type: ignore[operator,union-attr]
    step(model, keep, batch, 1, "fp32")
    full = dict(zip(names, keep.kept, strict=True))
    rows = 0
    loss = step(model, keep, batch, accum, "fp32")
    hook.remove()
    own = dict(zip(names, keep.kept, strict=True))
    towers = [name for name in names if name != "logit_scale"]
    worst = max(float((own[n] - full[n]).norm() / full[n].norm().clamp(min=1e-12)) for n in towers)
    return {
        "temperature_ratio": float(own["logit_scale"] / full["logit_scale"]),
        "worst_tower_parameter": worst,
        "encodings_of_a_image": rows / len(batch[0]),
        "losses_over_all_features": loss.requested,
    }


def main() -> None:
    """Answer until the input ends."""
    with open(sys.argv[1], encoding="utf-8") as file:
        job = json.load(file)
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(job["threads"])
    torch.manual_seed(0)
    model, _ = open_clip_model(job)
    shape, draw = job["shape"], torch.Generator().manual_seed(0)
    images = torch.randn(job["batch"], 3, shape["image_size"], shape["image_size"], generator=draw)
    texts = torch.randint(
        3, shape["vocab_size"] - 1, (job["batch"], job["text_tokens"]), generator=draw
    )
    texts[:, -1] = shape["vocab_size"] - 1
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    for line in sys.stdin:
        question = json.loads(line)
        answer: Any = None
        if question["do"] == "versions":
            answer = {"open_clip": open_clip.__version__, "torch": torch.__version__}
        elif question["do"] == "gradients":
            answer = gradients(model, (images, texts), job["batch"] // job["chunk"])
        elif question["do"] == "peak":
            kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            answer = kilobytes if sys.platform == "darwin" else kilobytes * 1024
        else:
            begin = time.perf_counter()
            step(model, optimizer, (images, texts), question["accum"], job["precision"])
            answer = time.perf_counter() - begin
        print(json.dumps({"answer": answer}), flush=True)


if __name__ == "__main__":
    main()
