"""Hugging Face Trainer on a tiny CLIP for the tests of tests/reliability/peers.py: TABLE OUT NAN_AT [resume].

Saves every 10 of 60 steps. Flips are drawn from torch's generator, as augmentations usually are.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import torchvision_ops  # noqa: F401  first: transformers may import torchvision

# isort: split
import numpy as np
import torch
from PIL import Image
from transformers import CLIPConfig, CLIPModel, Trainer, TrainingArguments, set_seed

SIZE, WORDS = 32, 16


class Pairs(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Images and captions of a table; letters are tokens."""

    def __init__(self, table: Path, nan_at: int, batch: int) -> None:
        with table.open() as file:
            self.rows = [(row["image"], row["caption"]) for row in csv.DictReader(file)]
        self.poisoned = nan_at * batch if nan_at > 0 else -1
        self.given = 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        path, caption = self.rows[index]
        with Image.open(path) as image:
            pixels = torch.from_numpy(np.array(image.convert("RGB").resize((SIZE, SIZE)))).permute(2, 0, 1) / 255
        if torch.rand(()) < 0.5:
            pixels = pixels.flip(-1)
        self.given += 1
        if self.given == self.poisoned:
            pixels = pixels * float("nan")
        ids = [1, *(3 + ord(letter) % 90 for letter in caption[: WORDS - 2]), 2]
        ids += [0] * (WORDS - len(ids))
        return {"pixel_values": pixels, "input_ids": torch.tensor(ids), "return_loss": True}


def collate(items: list[dict[str, Any]]) -> dict[str, Any]:
    """A batch; the loss is the model's own."""
    return {
        "pixel_values": torch.stack([item["pixel_values"] for item in items]),
        "input_ids": torch.stack([item["input_ids"] for item in items]),
        "return_loss": True,
    }


def main() -> None:
    """Train, or continue from the newest checkpoint."""
    table, out, nan_at = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    set_seed(0)
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**tower, "vocab_size": 100, "max_position_embeddings": WORDS, "eos_token_id": 2, "bos_token_id": 1,
            "pad_token_id": 0}  # fmt: skip
    config = CLIPConfig(
        text_config=text, vision_config={**tower, "image_size": SIZE, "patch_size": 8}, projection_dim=32
    )
    arguments = TrainingArguments(
        output_dir=out, max_steps=60, per_device_train_batch_size=8, save_steps=10, save_total_limit=3, logging_steps=1,
        learning_rate=1e-3, use_cpu=True, report_to=[], disable_tqdm=True, dataloader_num_workers=0, seed=0,
        remove_unused_columns=False,
    )  # fmt: skip
    trainer = Trainer(
        model=CLIPModel(config), args=arguments, train_dataset=Pairs(table, nan_at, 8), data_collator=collate
    )
    trainer.train(resume_from_checkpoint=True if "resume" in sys.argv[4:] else None)


if __name__ == "__main__":
    main()
