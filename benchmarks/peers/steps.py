"""Training steps of open_clip and Hugging Face's CLIPModel, one per request. Runs in a Python that has both.

Argument: a JSON file with the job (shape, batch, text tokens, threads). Each line on standard input
is a JSON object: {"do": "versions"}, {"do": "step", "variant": "open_clip amp_bf16"} or {"do":
"drop", "variant": ...}; each gets one line of JSON back. Inputs lie ready as float images and token
ids: the peers' data path costs nothing here.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torchvision_ops  # noqa: F401  first: open_clip imports torchvision

# isort: split
import open_clip
import transformers
from open_clip.loss import ClipLoss
from open_clip.model import CLIP
from torch import Tensor, nn

BATCHES = 4  # different inputs, taken in turn
Loss = Callable[[Tensor, Tensor], Tensor]


def open_clip_model(job: dict[str, Any]) -> tuple[nn.Module, Loss]:
    """open_clip's CLIP of this shape, and its loss."""
    shape = job["shape"]
    vision = {
        "layers": shape["vision_layers"], "width": shape["vision_width"], "patch_size": shape["patch_size"],
        "head_width": shape["vision_width"] // shape["vision_heads"], "image_size": shape["image_size"],
        "mlp_ratio": shape["mlp_ratio"], "no_ln_pre": not shape["vision_pre_norm"],
    }  # fmt: skip
    text = {
        "context_length": job["text_tokens"], "vocab_size": shape["vocab_size"], "width": shape["text_width"],
        "heads": shape["text_heads"], "layers": shape["text_layers"], "mlp_ratio": shape["mlp_ratio"],
    }  # fmt: skip
    model = CLIP(shape["embed_dim"], vision, text, output_dict=True)
    criterion = ClipLoss()
    return model, lambda out, _: criterion(**out)


def hugging_face_model(job: dict[str, Any], attention: str) -> tuple[nn.Module, Loss]:
    """transformers' CLIPModel of this shape; it computes its own loss."""
    shape = job["shape"]

    def tower(side: str) -> dict[str, Any]:
        width = shape[f"{side}_width"]
        return {
            "hidden_size": width, "intermediate_size": int(width * shape["mlp_ratio"]), "hidden_act": "gelu",
            "num_hidden_layers": shape[f"{side}_layers"], "num_attention_heads": shape[f"{side}_heads"],
        }  # fmt: skip

    last = shape["vocab_size"] - 1
    text = {"vocab_size": last + 1, "max_position_embeddings": job["text_tokens"], "eos_token_id": last,
            "bos_token_id": 1, "pad_token_id": 0, **tower("text")}  # fmt: skip
    vision = {
        "image_size": shape["image_size"],
        "patch_size": shape["patch_size"],
        **tower("vision"),
    }
    config = transformers.CLIPConfig(
        text_config=text, vision_config=vision, projection_dim=shape["embed_dim"]
    )
    config._attn_implementation = attention
    model = transformers.CLIPModel._from_config(config, attn_implementation=attention)
    return model, lambda out, _: out.loss


class Trainer:
    """One model with its optimizer, in one of the ways its library can run."""

    def __init__(self, variant: str, job: dict[str, Any]) -> None:
        library, *flags = variant.split()
        torch.manual_seed(0)
        self.hugging_face = library == "hugging_face"
        if self.hugging_face:
            model, self.loss = hugging_face_model(job, "eager" if "eager" in flags else "sdpa")
        else:
            model, self.loss = open_clip_model(job)
        self.dtype = torch.float32
        if "pure_bf16" in flags:
            self.dtype = torch.bfloat16
            model = model.to(self.dtype)
        self.mixed = "amp_bf16" in flags
        self.parameters = sum(p.numel() for p in model.parameters())
        self.scale = model.logit_scale
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=1e-4, weight_decay=0.1, fused=True
        )
        self.model = torch.compile(model.train()) if "compiled" in flags else model.train()
        size, batch, shape = job["shape"]["image_size"], job["batch"], job["shape"]
        draw = torch.Generator().manual_seed(0)
        self.inputs = [
            (
                torch.randn(batch, 3, size, size, generator=draw).to(self.dtype),
                torch.randint(
                    3, shape["vocab_size"] - 1, (batch, job["text_tokens"]), generator=draw
                ),
            )
            for _ in range(BATCHES)
        ]
        for _, ids in self.inputs:
            ids[:, -1] = shape["vocab_size"] - 1  # the EOT token, which both libraries look for
        self.done = 0

    def step(self) -> float:
        """One complete update; returns the loss."""
        pixels, ids = self.inputs[self.done % BATCHES]
        self.done += 1
        context = torch.autocast("cpu", torch.bfloat16) if self.mixed else contextlib.nullcontext()
        self.optimizer.zero_grad()
        with context:
            if self.hugging_face:
                out = self.model(input_ids=ids, pixel_values=pixels, return_loss=True)
            else:
                out = self.model(pixels, ids)
            loss = self.loss(out, ids)
        loss.backward()
        self.optimizer.step()
        with torch.no_grad():
            self.scale.clamp_(0, 4.6052)
        return float(loss.item())


def main() -> None:
    """Answer until the input ends."""
    with open(sys.argv[1], encoding="utf-8") as file:
        job = json.load(file)
    torch.set_num_threads(job["threads"])
    trainers: dict[str, Trainer] = {}
    for line in sys.stdin:
        question = json.loads(line)
        answer: Any = None
        if question["do"] == "versions":
            answer = {"open_clip": open_clip.__version__, "transformers": transformers.__version__,
                      "torch": torch.__version__}  # fmt: skip
        elif question["do"] == "drop":
            trainers.pop(question["variant"], None)
            torch.compiler.reset()
        else:
            if question["variant"] not in trainers:
                trainers[question["variant"]] = Trainer(question["variant"], job)
            trainer = trainers[question["variant"]]
            begin, used = time.perf_counter(), time.process_time()
            loss = trainer.step()
            answer = {"seconds": time.perf_counter() - begin, "cpu_seconds": time.process_time() - used,
                      "loss": loss, "parameters": trainer.parameters}  # fmt: skip
        print(json.dumps({"answer": answer}), flush=True)


if __name__ == "__main__":
    main()
