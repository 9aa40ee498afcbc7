"""Train many small models from random weights on one GPU, each in a CUDA graph, several at a time.

    python benchmarks/recipe_study.py pack DATA study-data.pt        # pixels and tokens, 112 px
    python benchmarks/recipe_study.py run study-data.pt QUEUE.json OUT --seconds 500 --processes 8

QUEUE.json is a list of jobs: {"name": ..., "seed": ..., "steps": ..., and fields of `Job`}. A group
`{"ensemble": "name", "of": [names]}` scores the embeddings of finished runs side by side. Results
are appended to OUT/runs.jsonl as they come; a job that would not end in time is not started.

The model, its losses, optimizers and views are those of m1clip; the loop is not: batches, views,
word dropout and learning rates are drawn on the GPU inside the graph, so random numbers differ from
m1clip's and the host only replays. All scores are of the validation split unless --test is given.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import io
import json
import math
import multiprocessing
import os
import queue
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from speedrun import write_splits
from torch import Tensor

from m1clip.data.augment import render
from m1clip.data.images import Preprocess
from m1clip.model.clip import CLIP, build_clip
from m1clip.model.presets import flops_per_pair, preset, with_fields
from m1clip.model.towers import VisionTower, whitening_filters
from m1clip.optimizers import is_hidden_matrix
from m1clip.training.muon import Muon
from m1clip.training.torch_optimizers import ADAMW_BETAS, ADAMW_EPS, AdamW

IMAGE_SIZE = 112
CAPTIONS = 5
CONTEXT = 32
TRAIN_CONTEXT = 24  # after word dropout: nearly all captions are shorter
SPLITS = ("train", "val", "test")
MAX_FIRST_ERRORS = 6  # if all of the first jobs fail, stop
MARGIN = 1.15  # of the predicted seconds of a job
LARGER = 128  # px, at which models are also scored: crops make objects larger in training
MILD_CROP = 0.8  # of the area, at the end of a run with `mild_end`
NEAREST = 10  # images with similar captions, of which one is drawn for `neighbors`


@dataclass(frozen=True)
class Job:
    """One run: its data, length, model and regularization."""

    name: str
    steps: int
    seed: int = 0
    images: int = 0  # of the training split, drawn by `draw`; 0: all
    draw: int = 0
    batch: int = 64
    captions: int = CAPTIONS
    vision_width: int = 256
    vision_layers: int = 4
    text_width: int = 256
    text_layers: int = 2
    embed_dim: int = 256
    mlp_ratio: float = 2.0
    lr: float = 5e-4
    muon_lr: float = 0.01
    wd: float = 0.1
    muon_wd: float = 0.3
    warmup: float = 0.05
    linear: bool = False  # the schedule: linear instead of cosine
    text_contrast: float = 0.5
    label_smoothing: float = 0.0
    crop_min: float = 0.6
    color_jitter: float = 0.2
    word_dropout: float = 0.3
    patch_dropout: float = 0.0
    cutmix: float = 0.0  # probability that an image of a batch gets a box of another
    mixup: float = 0.0
    paste: float = 0.0  # as cutmix, but the targets stay those of the first image
    paste_area: float = 0.5  # of the largest box of `paste`, `cutmix` and `erase`
    erase: float = 0.0  # probability that an image gets a gray box
    text_swap: float = 0.0  # probability that a token is replaced by a random token of the batch
    feature_dropout: float = 0.0  # before the heads
    feature_noise: float = 0.0  # deviation of noise on the unit vectors, times 1 / sqrt(d)
    ema: float = 0.0  # also score an average of the weights with this decay
    teacher_ema: float = 0.0  # weight of a loss to the averaged model's embeddings of clean inputs
    image_views: float = 0.0  # weight of a loss between two views of each image
    teacher: float = 0.0  # weight of a loss to the embeddings of a pretrained model
    teacher_scale: float = 15.0
    evaluations: int = 5
    keep: bool = False  # embeddings, for ensembles and as teachers
    born_again: str = ""  # names of finished jobs whose kept embeddings of the training split teach
    born_scale: float = 20.0
    born: float = 0.5
    init_seed: int = -1  # of the weights; -1: `seed`, which then is that of batches and views only
    mild_end: float = 0.0  # the last part of the steps: no CutMix, whole captions and wider crops
    ramp: bool = False  # `mild_end` begins little by little, not at once
    clip: float = 0.0  # largest norm of the gradients; 0: any
    mirror: bool = False  # score images with their mirror images
    neighbors: float = 0.0  # part of a batch that are images whose captions resemble the others'
    floor: float = 0.0  # of the learning rate at the end, for averages of weights
    average_end: float = 0.0  # also score the mean of the weights over this last part of the steps


def pack(data: Path, out: Path, teacher: Path | None, splits: list[str]) -> None:
    """Write the JPEG files, tokens and optionally a teacher's embeddings of each split to one file."""
    from m1clip.text.bpe import BpeTokenizer

    with tempfile.TemporaryDirectory() as folder:
        write_splits(str(data), Path(folder))
        lines = [
            line
            for split in SPLITS
            for line in (Path(folder) / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        ]
    rows = [json.loads(line) for line in lines]
    train = [text for row in rows if row["split"] == "train" for text in row["captions"]]
    tokenizer = BpeTokenizer().prune_to(train)
    packed: dict[str, Any] = {"vocab": tokenizer.vocab_size}
    for split in splits:
        own = [row for row in rows if row["split"] == split]
        files = [Path(row["image"]).read_bytes() for row in own]
        texts = [text for row in own for text in row["captions"][:CAPTIONS]]
        tokens = torch.as_tensor(np.asarray(tokenizer.tokenize(texts, CONTEXT)), dtype=torch.int16)
        packed[split] = {
            "files": torch.frombuffer(bytearray(b"".join(files)), dtype=torch.uint8),
            "sizes": torch.tensor([len(each) for each in files]),
            "tokens": F.pad(tokens, (0, CONTEXT - tokens.shape[1])).view(len(own), CAPTIONS, -1),
        }
    if teacher is not None:
        packed["teacher"] = torch.load(teacher, weights_only=True)
    torch.save(packed, out)
    print(f"{out}: {os.path.getsize(out) / 1e6:.0f} MB, vocabulary {tokenizer.vocab_size}")


def decode(file: bytes, side: int = IMAGE_SIZE) -> np.ndarray:
    """Pixels of one JPEG file, squashed to a square."""
    from PIL import Image

    with Image.open(io.BytesIO(file)) as image:
        return np.asarray(image.convert("RGB").resize((side, side), Image.Resampling.BICUBIC))


def unpack(path: Path, out: Path) -> None:
    """Decode a packed file for the workers."""
    packed = torch.load(path, weights_only=True)
    for split in SPLITS:
        if split not in packed:
            continue
        part = packed[split]
        files = [each.numpy().tobytes() for each in part.pop("files").split(part["sizes"].tolist())]
        with multiprocessing.get_context("spawn").Pool(min(16, os.cpu_count() or 1)) as pool:
            pixels = np.stack(pool.map(decode, files, chunksize=100))
            if split != "train":
                larger = functools.partial(decode, side=LARGER)
                part["larger"] = torch.from_numpy(np.stack(pool.map(larger, files, chunksize=100)))
        part["pixels"] = torch.from_numpy(pixels)
        part["tokens"] = part["tokens"].int()
    torch.save(packed, out)


class Trainer:
    """One job on the GPU: a step that needs nothing from the host."""

    def __init__(self, job: Job, data: dict[str, Any], device: str, kept: Path) -> None:
        self.job = job
        self.device = torch.device(device)
        self.kept = kept
        torch.manual_seed(job.seed if job.init_seed < 0 else job.init_seed)
        chosen = torch.arange(len(data["train"]["pixels"]))
        if job.images:
            generator = torch.Generator().manual_seed(1000 + job.draw)
            chosen = torch.randperm(len(chosen), generator=generator)[: job.images]
        self.pixels = data["train"]["pixels"][chosen.to(data["train"]["pixels"].device)]
        self.tokens = data["train"]["tokens"][chosen.to(data["train"]["tokens"].device)].long()
        self.data = data
        self.eot = data["vocab"] - 1
        base = preset("tiny")
        config = with_fields(
            base,
            vocab_size=data["vocab"],
            vision_width=job.vision_width,
            vision_layers=job.vision_layers,
            vision_heads=job.vision_width // 64,
            text_width=job.text_width,
            text_layers=job.text_layers,
            text_heads=job.text_width // 64,
            embed_dim=job.embed_dim,
            mlp_ratio=job.mlp_ratio,
            mirror=job.mirror,
        )
        self.config = config
        self.model = build_clip(config)
        self.model.initialize()
        self.preprocess = Preprocess(image_size=IMAGE_SIZE)
        first = render(self.pixels[:256].cpu(), None, self.preprocess)
        tower = self.model.image_tower
        assert isinstance(tower, VisionTower)
        tower.set_stem_filters(whitening_filters(first, config.own_towers[0].stem_channels[0]))
        self.model.to(self.device).train()
        torch.manual_seed(job.seed)
        self.flops = job.batch * (
            flops_per_pair(config, 14) + (job.captions - 1) * self._text_flops()
        )
        self.average = None
        if job.ema or job.teacher_ema or job.average_end:
            self.average = build_clip(config).to(self.device).requires_grad_(False)
            self.average.load_state_dict(self.model.state_dict())
        self.teacher = self._teacher_embeddings(chosen)
        self._plan()
        named = list(self.model.named_parameters())
        hidden = [p for name, p in named if is_hidden_matrix(name, p)]
        rest = [p for name, p in named if not is_hidden_matrix(name, p)]
        self.lr = torch.tensor(0.0, device=self.device)
        self.muon_lr = torch.tensor(0.0, device=self.device)
        self.muon = Muon(hidden, lr=self.muon_lr, weight_decay=job.muon_wd, dtype=torch.bfloat16)
        groups = [
            {"params": [p for p in rest if p.ndim >= 2], "weight_decay": job.wd},
            {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
        ]
        cuda = self.device.type == "cuda"
        self.adamw = AdamW(
            groups,
            lr=self.lr if cuda else job.lr,
            betas=ADAMW_BETAS,
            eps=ADAMW_EPS,
            capturable=cuda,
            fused=cuda,
        )

    def _text_flops(self) -> float:
        text = self.config.own_towers[1]
        matrices = (4 + 2 * text.mlp_ratio) * text.width**2 * 14
        return 3 * 2 * (text.layers * (matrices + 2 * 14**2 * text.width))

    def _teacher_embeddings(self, chosen: Tensor) -> tuple[Tensor, Tensor] | None:
        """(images, captions) embeddings that teach, of the chosen training images."""
        if self.job.born_again:
            parts = [
                torch.load(self.kept / f"{name}.pt", weights_only=True)["train"]
                for name in self.job.born_again.split(",")
            ]
            image = torch.cat([part[0].float() for part in parts], dim=1)
            text = torch.cat([part[1].float() for part in parts], dim=2)
            return (
                F.normalize(image, dim=-1).to(self.device),
                F.normalize(text, dim=-1).to(self.device),
            )
        if self.job.teacher:
            image, text = self.data["teacher"]["train"]
            image = image[chosen.to(image.device)].float()
            text = text[chosen.to(text.device)].float()
            return (
                F.normalize(image, dim=-1).to(self.device),
                F.normalize(text, dim=-1).to(self.device),
            )
        return None

    def _plan(self) -> None:
        """Orders of the images and learning rates of all steps, on the device."""
        job = self.job
        count = len(self.pixels)
        generator = torch.Generator().manual_seed(job.seed + 7)
        per_epoch = count // job.batch * job.batch
        epochs = math.ceil(job.steps * job.batch / per_epoch)
        orders = [torch.randperm(count, generator=generator)[:per_epoch] for _ in range(epochs)]
        self.order = self._with_neighbors(torch.cat(orders), generator).to(self.device)
        steps = torch.arange(job.steps, dtype=torch.float64)
        warm = max(1, round(job.warmup * job.steps))
        progress = ((steps - warm) / max(1, job.steps - warm)).clamp(0, 1)
        decay = 1 - progress if job.linear else 0.5 * (1 + torch.cos(math.pi * progress))
        decay = job.floor + (1 - job.floor) * decay
        first_mild = round((1 - job.mild_end) * job.steps)
        mild = (steps >= first_mild).float()
        if job.ramp:
            mild = ((steps - first_mild) / max(1, job.steps - first_mild)).clamp(0, 1)
        self.mild = mild.float().to(self.device)
        averaged = (steps - round((1 - job.average_end) * job.steps) + 1).clamp(min=1)
        self.average_weights = (1 / averaged).float().to(self.device)
        self.fractions = torch.where(steps < warm, (steps + 1) / (warm + 1), decay)
        self.fractions = self.fractions.float().to(self.device)
        self.step_index = torch.zeros((), dtype=torch.long, device=self.device)

    def _with_neighbors(self, order: Tensor, generator: torch.Generator) -> Tensor:
        """The order of images, where some of each batch are replaced by images like the others."""
        job = self.job
        count = round(job.neighbors * job.batch)
        if not count:
            return order
        words = torch.zeros(len(self.tokens), self.data["vocab"], device=self.device)
        words.scatter_add_(
            1, self.tokens.flatten(1), torch.ones_like(self.tokens.flatten(1)).float()
        )
        words[:, 0] = 0
        known = (words > 0).float()
        words = F.normalize(known * (len(words) / known.sum(dim=0).clamp(min=1)).log(), dim=1)
        similar = words @ words.T
        similar.fill_diagonal_(-1)
        nearest = similar.topk(NEAREST, dim=1).indices.cpu()
        batches = order.view(-1, job.batch)
        chosen = torch.randint(NEAREST, (len(batches), count), generator=generator)
        batches[:, -count:] = nearest[batches[:, :count]].gather(2, chosen[:, :, None])[:, :, 0]
        return batches.flatten()

    def _mildly(self, strong: float, mild: float) -> Tensor:
        """A strength at the step at `step_index`: weaker at the end of a run with `mild_end`."""
        is_mild = self.mild.index_select(0, self.step_index.view(1))[0]
        return strong + is_mild * (mild - strong)

    def _random(self, *shape: int) -> Tensor:
        return torch.rand(*shape, device=self.device)

    def _views(self, count: int) -> Tensor:
        """(n, 7): random boxes, flips and colors, as m1clip.data.augment draws them."""
        job = self.job
        draws = self._random(7, count)
        smallest = self._mildly(job.crop_min, max(job.crop_min, MILD_CROP))
        area = smallest + (1 - smallest) * draws[0]
        stretch = torch.exp((2 * draws[1] - 1) * math.log(4 / 3))
        if job.crop_min == 1:
            stretch = torch.ones_like(stretch)
        width = (area * stretch).sqrt().clamp(max=1.0)
        height = (area / stretch).sqrt().clamp(max=1.0)
        flips = (draws[4] < 0.5).float()
        jitter = 1 + job.color_jitter * (2 * draws[5:] - 1)
        return torch.stack(
            [draws[2] * (1 - width), draws[3] * (1 - height), width, height, flips, *jitter], 1
        )

    def _boxes(self, count: int) -> Tensor:
        """(n, 1, size, size) bool, boxes whose area is uniform from 0 to the half of the image."""
        side = (self.job.paste_area * self._random(count)).sqrt()
        center = self._random(count, 2)
        line = (torch.arange(IMAGE_SIZE, device=self.device) + 0.5) / IMAGE_SIZE
        rows = (line[None] - center[:, :1]).abs() < side[:, None] / 2
        columns = (line[None] - center[:, 1:]).abs() < side[:, None] / 2
        return (rows[:, :, None] & columns[:, None, :])[:, None]

    def _drop_words(self, tokens: Tensor) -> Tensor:
        """Remove tokens at random, never start and EOT."""
        job = self.job
        if job.text_swap:
            others = tokens.flatten()[
                (self._random(*tokens.shape) * tokens.numel()).long().clamp(max=tokens.numel() - 1)
            ]
            special = (tokens >= self.eot - 1) | (tokens == 0) | (others >= self.eot - 1)
            swapped = (self._random(*tokens.shape) < job.text_swap) & ~special & (others != 0)
            tokens = torch.where(swapped, others, tokens)
        if not job.word_dropout:
            return tokens
        position = torch.arange(tokens.shape[1], device=self.device)
        end = (tokens == self.eot).int().argmax(dim=1, keepdim=True)
        dropout = self._mildly(job.word_dropout, 0.0)
        dropped = (self._random(*tokens.shape) < dropout) & (position > 0)
        dropped = dropped & (position < end)
        order = torch.argsort(dropped.to(torch.uint8), dim=1, stable=True)
        tokens = tokens.gather(1, order)[:, :TRAIN_CONTEXT]
        missing = (tokens == self.eot).any(dim=1, keepdim=True).logical_not()
        last = torch.arange(TRAIN_CONTEXT, device=self.device) == TRAIN_CONTEXT - 1
        return tokens.masked_fill(missing & last, self.eot)

    def _targets(self, count: int, image_index: Tensor) -> Tensor:
        return (torch.arange(count, device=self.device)[:, None] == image_index).float()

    def loss(self) -> Tensor:
        """The loss of the step at `step_index`."""
        job = self.job
        place = self.step_index * job.batch + torch.arange(job.batch, device=self.device)
        chosen = self.order[place]
        pixels = self.pixels[chosen]
        tokens = self.tokens[chosen]
        if job.captions < CAPTIONS:
            which = self._random(job.batch, CAPTIONS).argsort(dim=1)[:, : job.captions]
            tokens = tokens.gather(1, which[:, :, None].expand(-1, -1, tokens.shape[2]))
        else:
            which = None
        image_index = torch.arange(job.batch, device=self.device).repeat_interleave(job.captions)
        target = self._targets(job.batch, image_index)  # (images, captions)
        dropped = self._drop_words(tokens.flatten(0, 1))
        with torch.autocast(self.device.type, torch.bfloat16):
            x = render(pixels, self._views(job.batch), self.preprocess)
            target = self._mix(x, target)
            image = self._encode_image(x)
            text = self._project(self.model.text_head, self.model.text_tower(dropped))
            second = None
            if job.image_views:
                y = render(pixels, self._views(job.batch), self.preprocess)
                second = self._encode_image(y)
        scale = self.model.scale().float()
        if job.feature_noise:
            spread = job.feature_noise / math.sqrt(job.embed_dim)
            image = F.normalize(image + spread * torch.randn_like(image), dim=-1)
            text = F.normalize(text + spread * torch.randn_like(text), dim=-1)
        logits = scale * image @ text.T
        total = self._contrast(logits, target)
        if job.text_contrast and job.captions > 1:
            total = total + job.text_contrast * self._text_contrast(scale * text @ text.T, target)
        if second is not None:
            eye = torch.eye(job.batch, device=self.device)
            total = total + job.image_views * self._contrast(scale * image @ second.T, eye)
        if self.average is not None and job.teacher_ema:
            total = total + job.teacher_ema * self._self_distillation(pixels, tokens, logits, scale)
        if self.teacher is not None:
            total = self._distillation(total, chosen, which, logits)
        return total

    def _encode_image(self, x: Tensor) -> Tensor:
        job = self.job
        tower = self.model.image_tower
        if job.patch_dropout:
            count = self.config.own_towers[0].patches
            keep = max(1, round(count * (1 - job.patch_dropout)))
            kept = self._random(len(x), count).argsort(dim=1)[:, :keep]
            return self._project(self.model.image_head, tower(x, kept))
        return self._project(self.model.image_head, tower(x))

    def _project(self, head: torch.nn.Module, features: Tensor) -> Tensor:
        if self.job.feature_dropout:
            kept = self._random(*features.shape) >= self.job.feature_dropout
            features = features * kept / (1 - self.job.feature_dropout)
        return F.normalize(head(features).float(), dim=-1)

    def _mix(self, x: Tensor, target: Tensor) -> Tensor:
        """Boxes of other images, or their mean, in place; the targets follow."""
        job = self.job
        if job.erase:
            hit = self._random(len(x)) < job.erase
            x.mul_(~(self._boxes(len(x)) & hit[:, None, None, None]))
        if job.paste:
            hit = self._random(len(x)) < job.paste
            box = self._boxes(len(x)) & hit[:, None, None, None]
            x.copy_(torch.where(box, x.roll(1, dims=0), x))
        if not (job.cutmix or job.mixup):
            return target
        other = x.roll(1, dims=0)
        if job.cutmix:
            hit = self._random(len(x)) < self._mildly(job.cutmix, 0.0)
            box = self._boxes(len(x)) & hit[:, None, None, None]
            mixed = torch.where(box, other, x)
            part = box.float().mean(dim=(1, 2, 3))[:, None]
        else:
            hit = self._random(len(x)) < job.mixup
            part = (0.5 * self._random(len(x)) * hit)[:, None]
            mixed = x + part[:, :, None, None] * (other - x)
        x.copy_(mixed)
        return target + part * (target.roll(1, dims=0) - target)

    def _contrast(self, logits: Tensor, target: Tensor) -> Tensor:
        rows = target / target.sum(dim=1, keepdim=True)
        columns = target.T / target.T.sum(dim=1, keepdim=True).clamp(min=1e-6)
        smooth = self.job.label_smoothing
        if smooth:
            rows = (1 - smooth) * rows + smooth / rows.shape[1]
            columns = (1 - smooth) * columns + smooth / columns.shape[1]
        by_row = -(rows * logits.log_softmax(dim=1)).sum(dim=1).mean()
        by_column = -(columns * logits.T.log_softmax(dim=1)).sum(dim=1).mean()
        return (by_row + by_column) / 2

    def _text_contrast(self, logits: Tensor, target: Tensor) -> Tensor:
        count = self.job.captions
        owner = torch.arange(len(logits), device=self.device) // count
        same = owner[:, None] == owner
        eye = torch.eye(len(logits), dtype=torch.bool, device=self.device)
        positive = (same & ~eye).float() / (count - 1)
        return -(positive * logits.masked_fill(eye, -1e4).log_softmax(dim=1)).sum(dim=1).mean()

    def _self_distillation(
        self, pixels: Tensor, tokens: Tensor, logits: Tensor, scale: Tensor
    ) -> Tensor:
        """KL divergence from the averaged model's logits of the complete images and captions."""
        assert self.average is not None
        with torch.no_grad(), torch.autocast(self.device.type, torch.bfloat16):
            image = self.average.encode_view(render(pixels, None, self.preprocess)).float()
            text = self.average.encode_text(tokens.flatten(0, 1)).float()
        with torch.no_grad():
            soft = scale * image @ text.T
        return self._divergence(soft, logits)

    def _divergence(self, soft: Tensor, logits: Tensor) -> Tensor:
        by_image = F.kl_div(
            logits.log_softmax(1), soft.log_softmax(1), reduction="batchmean", log_target=True
        )
        by_text = F.kl_div(
            logits.T.log_softmax(1), soft.T.log_softmax(1), reduction="batchmean", log_target=True
        )
        return (by_image + by_text) / 2

    def _distillation(
        self, total: Tensor, chosen: Tensor, which: Tensor | None, logits: Tensor
    ) -> Tensor:
        job = self.job
        assert self.teacher is not None
        image, text = self.teacher
        own = text[chosen]
        if which is not None:
            own = own.gather(1, which[:, :, None].expand(-1, -1, own.shape[2]))
        scale = job.born_scale if job.born_again else job.teacher_scale
        weight = job.born if job.born_again else job.teacher
        soft = scale * image[chosen] @ own.flatten(0, 1).T
        return (1 - weight) * total + weight * self._divergence(soft, logits)

    def step(self) -> Tensor:
        """One step: views, loss, gradients, update."""
        # Not an index by a scalar, which would be read on the host.
        fraction = self.fractions.index_select(0, self.step_index.view(1))[0]
        self.muon_lr.copy_(self.job.muon_lr * fraction)
        if self.device.type == "cuda":
            self.lr.copy_(self.job.lr * fraction)
        else:
            for group in self.adamw.param_groups:
                group["lr"] = self.job.lr * float(fraction)
        for p in self.model.parameters():
            p.grad = None
        loss = self.loss()
        loss.backward()
        if self.job.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.job.clip, foreach=True)
        self.muon.step()
        self.adamw.step()
        self.model.clamp_scale()
        if self.average is not None:
            weights = [p.detach() for p in self.model.parameters()]
            own = list(self.average.parameters())
            if self.job.average_end:
                weight = self.average_weights.index_select(0, self.step_index.view(1))[0]
                steps = torch._foreach_sub(weights, own)  # a lerp by a tensor cannot be captured
                torch._foreach_mul_(steps, weight)
                torch._foreach_add_(own, steps)
            else:
                torch._foreach_lerp_(own, weights, 1 - (self.job.ema or 0.998))
        self.step_index += 1
        return loss.detach()

    def train(self) -> dict[str, Any]:
        """Make all steps; the record of the run."""
        job = self.job
        began = time.time()
        replay = self._captured() if self.device.type == "cuda" else self.step
        marks = {round(job.steps * (i + 1) / job.evaluations) for i in range(job.evaluations)}
        curve = []
        averaged = []
        start = time.time()
        done = int(self.step_index)
        while done < job.steps:
            replay()
            done += 1
            if done in marks:
                score = self.score("val", self.model)
                curve.append([done, *score])
                if self.average is not None:
                    averaged.append([done, *self.score("val", self.average)])
        loss = float(self.last) if self.device.type == "cuda" else 0.0
        seconds = time.time() - start
        record = {
            **dataclasses.asdict(job),
            "curve": curve,
            "averaged": averaged,
            "validation": curve[-1][1],
            "seconds": round(seconds, 2),
            "set_up_seconds": round(start - began, 2),
            "step_ms": round(1000 * seconds / max(1, job.steps), 3),
            "tflop": round(job.steps * self.flops / 1e12, 2),
            "loss": loss,
            "views": {
                split: self._by_view(split)
                for split in SPLITS
                if "larger" in self.data.get(split, {})
            },
        }
        if job.keep:
            self._keep()
        return record

    def _captured(self) -> Any:
        """A function that replays the step; the first steps are eager."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        if os.environ.get("RECIPE_STUDY_EAGER"):
            return self._eager
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.last = self.step()
        return graph.replay

    def _eager(self) -> None:
        self.last = self.step()

    @torch.no_grad()
    def embed(self, split: str, model: CLIP, all_images: bool = True) -> tuple[Tensor, Tensor]:
        """(n, d) and (n, captions, d) unit vectors."""
        own = split == "train"
        pixels = self.pixels if own else self.data[split]["pixels"]
        tokens = self.tokens if own else self.data[split]["tokens"]
        images, texts = [], []
        model.eval()
        with torch.autocast(self.device.type, torch.bfloat16):
            for start in range(0, len(pixels), 500):
                part = render(pixels[start : start + 500], None, self.preprocess)
                images.append(model.encode_image(part).float())
                rows = tokens[start : start + 500].flatten(0, 1).long()
                texts.append(
                    model.encode_text(rows).float().view(-1, CAPTIONS, images[-1].shape[1])
                )
        model.train()
        return torch.cat(images), torch.cat(texts)

    def score(self, split: str, model: CLIP) -> tuple[float, float, float]:
        return recall(*self.embed(split, model))

    @torch.no_grad()
    def _by_view(self, split: str) -> dict[str, float]:
        """Recall@10 with each image as it is, averaged with its mirror image, and at 128 px."""
        _, text = self.embed(split, self.model)
        larger = CLIP(self.config.resized(LARGER)).to(self.device).eval()
        larger.load_state_dict(self.model.state_dict())
        vectors = {}
        for name, model, pixels in (
            ("", self.model, self.data[split]["pixels"]),
            ("mirrored", self.model, self.data[split]["pixels"].flip(2)),
            ("larger", larger, self.data[split]["larger"]),
            ("larger mirrored", larger, self.data[split]["larger"].flip(2)),
        ):
            side = pixels.shape[1]
            preprocess = Preprocess(image_size=side)
            model.eval()
            with torch.autocast(self.device.type, torch.bfloat16):
                parts = [
                    model.encode_view(render(part, None, preprocess)).float()
                    for part in pixels.split(500)
                ]
            vectors[name] = torch.cat(parts)
        self.model.train()
        both = {
            "complete": vectors[""],
            "with mirror image": vectors[""] + vectors["mirrored"],
            "larger": vectors["larger"],
            "larger with mirror image": vectors["larger"] + vectors["larger mirrored"],
            "both sizes": vectors[""] + vectors["larger"],
        }
        return {name: recall(F.normalize(v, dim=-1), text)[0] for name, v in both.items()}

    def _keep(self) -> None:
        found = {}
        for split in [split for split in SPLITS if split in self.data]:
            image, text = self.embed(split, self.model)
            found[split] = (image.half().cpu(), text.half().cpu())
        torch.save(found, self.kept / f"{self.job.name}.pt")


def recall(image: Tensor, text: Tensor) -> tuple[float, float, float]:
    """(mean recall@10 of both directions, mean of six recalls, recall@10 text to image) in percent."""
    n = len(image)
    scores = text.flatten(0, 1) @ image.T  # (captions, images)
    owner = torch.arange(n, device=image.device).repeat_interleave(text.shape[1])
    own = scores.gather(1, owner[:, None])
    by_text = (scores > own).sum(dim=1)
    best = own.view(n, -1).amax(dim=1)
    by_image = (best[:, None] < scores.T).sum(dim=1)
    found = [
        100 * float((ranks < k).float().mean()) for ranks in (by_text, by_image) for k in (1, 5, 10)
    ]
    return round((found[2] + found[5]) / 2, 2), round(sum(found) / 6, 2), round(found[2], 2)


def to_device(data: dict[str, Any], device: str) -> dict[str, Any]:
    moved: dict[str, Any] = {"vocab": data["vocab"]}
    for split in SPLITS:
        if split not in data:
            continue
        moved[split] = {
            "pixels": data[split]["pixels"].to(device),
            "tokens": data[split]["tokens"].to(device),
        }
        if "larger" in data[split]:
            moved[split]["larger"] = data[split]["larger"].to(device)
    if "teacher" in data:
        moved["teacher"] = {
            split: tuple(part.to(device) for part in parts)
            for split, parts in data["teacher"].items()
        }
    return moved


def cost(job: dict[str, Any]) -> float:
    """Relative duration of a step, for the decision whether a job still fits."""
    wide = (job.get("vision_width", 256) / 256) ** 1.5 * (job.get("batch", 64) / 64) ** 0.7
    extra = 1 + 0.3 * bool(job.get("teacher_ema")) + 0.3 * bool(job.get("image_views"))
    return wide * extra * (0.5 + job.get("vision_layers", 4) / 8)


def worker(
    number: int,
    jobs: Any,
    results: Any,
    path: str,
    device: str,
    deadline: float,
    kept: str,
    speed: Any,
) -> None:
    """Take jobs until none fits before the deadline."""
    torch.set_num_threads(1)
    data = to_device(torch.load(path, weights_only=True, mmap=True), device)
    while True:
        try:
            job = jobs.get(timeout=1)
        except queue.Empty:
            return
        if job is None:
            return
        expected = speed.value * job["steps"] * cost(job) + 6
        if time.time() + MARGIN * expected > deadline:
            results.put({"name": job["name"], "skipped": round(expected, 1)})
            continue
        waited = time.time() + 60
        needed = [n for n in job.get("born_again", "").split(",") if n]
        while not all((Path(kept) / f"{n}.pt").exists() for n in needed):
            if time.time() > min(waited, deadline):
                break
            time.sleep(0.5)
        try:
            began = time.time()
            record = Trainer(Job(**job), data, device, Path(kept)).train()
            record["worker"] = number
            record["total_seconds"] = round(time.time() - began, 1)
            with speed.get_lock():
                measured = record["seconds"] / job["steps"] / cost(job)
                speed.value = 0.5 * speed.value + 0.5 * measured
            results.put(record)
        except Exception as error:  # noqa: BLE001  one job must not end the others
            results.put({"name": job["name"], "error": f"{type(error).__name__}: {error}"[:500]})
        if device == "cuda":
            torch.cuda.empty_cache()


def check_capture(outcome: Any) -> None:
    """Capture a step with every option; True into the queue if that works. In a process of its own:
    a failed capture breaks the random numbers of its process."""
    try:
        pixels = torch.randint(0, 255, (200, IMAGE_SIZE, IMAGE_SIZE, 3), dtype=torch.uint8)
        tokens = torch.randint(1, 90, (200, CAPTIONS, CONTEXT), dtype=torch.int32)
        tokens[:, :, 12] = 99
        larger = torch.zeros(200, LARGER, LARGER, 3, dtype=torch.uint8)
        split = {"pixels": pixels, "tokens": tokens, "larger": larger}
        teacher = {"train": (torch.randn(200, 16), torch.randn(200, CAPTIONS, 16))}
        data = {"vocab": 100, "train": split, "val": split, "teacher": teacher}
        moved = to_device(data, "cuda")
        every = Job(
            *("check", 12),
            **{"cutmix": 0.5, "erase": 0.5, "text_swap": 0.1, "feature_dropout": 0.1},
            **{"feature_noise": 0.1, "ema": 0.9, "teacher_ema": 0.5, "image_views": 0.2},
            **{"patch_dropout": 0.3, "label_smoothing": 0.1, "captions": 2, "teacher": 0.5},
            **{"mild_end": 0.2, "neighbors": 0.5},
        )
        for job in (Job("plain", 12, mixup=0.5, average_end=0.3), every):
            record = Trainer(job, moved, "cuda", Path()).train()
            assert math.isfinite(record["loss"]), record
        outcome.put("")
    except Exception:  # noqa: BLE001  reported, and the steps run without graphs
        outcome.put(traceback.format_exc())


def start_mps() -> bool:
    """Whether kernels of several processes run at the same time."""
    if "CUDA_MPS_PIPE_DIRECTORY" in os.environ:  # whoever set it has started it
        return True
    os.environ["CUDA_MPS_PIPE_DIRECTORY"] = "/tmp/mps-pipe"
    os.environ["CUDA_MPS_LOG_DIRECTORY"] = "/tmp/mps-log"
    for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"):
        Path(os.environ[name]).mkdir(exist_ok=True)
    try:
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True, timeout=20)
        time.sleep(1)
        works = "import torch; torch.ones(4, device='cuda').sum().item()"
        subprocess.run([sys.executable, "-c", works], check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"no MPS: {error}", flush=True)
        for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"):
            os.environ.pop(name, None)
        return False
    return True


def ensembles(groups: list[dict[str, Any]], kept: Path, device: str, test: bool) -> list[dict]:
    """Recall of embeddings side by side."""
    found = []
    for group in groups:
        paths = [kept / f"{name}.pt" for name in group["of"]]
        paths = [path for path in paths if path.exists()]
        if len(paths) < 2:
            continue
        record = {"ensemble": group["ensemble"], "of": [path.stem for path in paths]}
        for split in ("val", "test") if test else ("val",):
            parts = [torch.load(path, weights_only=True)[split] for path in paths]
            image = torch.cat([part[0].float().to(device) for part in parts], dim=-1)
            text = torch.cat([part[1].float().to(device) for part in parts], dim=-1)
            record[split] = recall(image, text)
        found.append(record)
    return found


def run(options: argparse.Namespace) -> None:
    """Run the queue until the deadline; results appear in OUT/runs.jsonl as they come."""
    began = time.time()
    deadline = began + options.seconds
    device = "cuda" if torch.cuda.is_available() else "cpu"
    out = options.out
    out.mkdir(parents=True, exist_ok=True)
    kept = Path(options.kept)
    kept.mkdir(parents=True, exist_ok=True)
    entries = json.loads(options.queue.read_text())
    mps = device == "cuda" and start_mps()
    context = multiprocessing.get_context("spawn")
    outcome = context.Queue()
    if device == "cuda":
        check = context.Process(target=check_capture, args=(outcome,))
        check.start()
    decoded = kept / "decoded.pt"
    unpack(options.data, decoded)
    print(f"decoded after {time.time() - began:.0f} s", flush=True)
    if device == "cuda":
        problem = outcome.get(timeout=90)
        check.join(10)
        if problem:
            os.environ["RECIPE_STUDY_EAGER"] = "1"
        print(f"capture: {problem or 'works'} ({time.time() - began:.0f} s)", flush=True)
    jobs = [entry for entry in entries if "steps" in entry]
    groups = [entry for entry in entries if "ensemble" in entry]
    processes = options.processes if mps or device == "cpu" else min(options.processes, 3)
    if options.processes_without_mps and not mps:
        processes = options.processes_without_mps
    waiting, results = context.Queue(), context.Queue()
    for job in jobs:
        waiting.put(job)
    for _ in range(processes):
        waiting.put(None)
    # Seconds of a step of `tiny` when all processes run: corrected by what is measured.
    speed = context.Value("d", 0.006 * max(1.0, processes / (3 if mps else 1)))
    arguments = (waiting, results, str(decoded), device, deadline, str(kept), speed)
    workers = [
        context.Process(target=worker, args=(number, *arguments)) for number in range(processes)
    ]
    for process in workers:
        process.start()
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    head = {"machine": name, "torch": torch.__version__, "mps": mps, "processes": processes}
    with (out / "runs.jsonl").open("a") as log:
        log.write(json.dumps(head) + "\n")
        ended = errors = 0
        while ended < len(jobs) and (time.time() < deadline + 5):
            try:
                record = results.get(timeout=2)
            except queue.Empty:
                if not any(process.is_alive() for process in workers):
                    break
                continue
            ended += 1
            errors += "error" in record
            log.write(json.dumps(record) + "\n")
            log.flush()
            shown = record.get("error") or record.get("skipped") or ""
            curve = " ".join(f"{point[1]:.1f}" for point in record.get("curve", []))
            average = " ".join(f"{point[1]:.1f}" for point in record.get("averaged", []))
            print(
                f"{time.time() - began:5.0f} s  {record['name']:<28} {curve} {f'({average})' if average else ''} "
                f"{record.get('step_ms', '')} ms, set-up {record.get('set_up_seconds', '')} {shown}",
                flush=True,
            )
            if errors == ended >= MAX_FIRST_ERRORS:
                break
        for record in ensembles(groups, kept, device, options.test):
            log.write(json.dumps(record) + "\n")
            print(record, flush=True)
    for process in workers:
        if process.is_alive():
            process.terminate()
    print(f"ended after {time.time() - began:.0f} s", flush=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = parser.add_subparsers(dest="action", required=True)
    packing = actions.add_parser("pack")
    packing.add_argument("data", type=Path)
    packing.add_argument("out", type=Path)
    packing.add_argument("--teacher", type=Path)
    packing.add_argument("--splits", nargs="+", choices=SPLITS, default=list(SPLITS))
    running = actions.add_parser("run")
    running.add_argument("data", type=Path)
    running.add_argument("queue", type=Path)
    running.add_argument("out", type=Path)
    running.add_argument("--seconds", type=float, default=500)
    running.add_argument("--processes", type=int, default=10)
    running.add_argument("--processes-without-mps", type=int, default=0)
    running.add_argument("--kept", default="/tmp/recipe-study-kept")
    running.add_argument("--test", action="store_true")
    options = parser.parse_args()
    if options.action == "pack":
        pack(options.data, options.out, options.teacher, options.splits)
    else:
        run(options)


if __name__ == "__main__":
    main()
