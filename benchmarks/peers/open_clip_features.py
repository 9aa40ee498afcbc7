"""Features of a split from a checkpoint of open_clip's trainer. Runs in a Python that has open_clip.

python open_clip_features.py CONFIG_FOLDER MODEL CHECKPOINT SPLIT.jsonl OUT

SPLIT.jsonl: a line an image, {"image": path, "captions": [...]}. Writes OUT/image.npy and OUT/text.npy, unit vectors
in the order of the file, and prints the version of open_clip.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torchvision_ops  # noqa: F401  first: open_clip imports torchvision

# isort: split
import open_clip
from PIL import Image

BATCH = 250


@torch.inference_mode()
def main() -> None:
    """Encode every image and every caption once."""
    folder, name, checkpoint, split, out = sys.argv[1:6]
    open_clip.add_model_config(folder)
    model, _, transform = open_clip.create_model_and_transforms(name)
    kept = torch.load(checkpoint, map_location="cpu", weights_only=True)["state_dict"]
    model.load_state_dict({key.removeprefix("module."): value for key, value in kept.items()})
    model.eval()
    tokenizer = open_clip.get_tokenizer(name)
    rows = [json.loads(line) for line in Path(split).read_text(encoding="utf-8").splitlines()]
    captions = [caption for row in rows for caption in row["captions"]]
    image, text = [], []
    for start in range(0, len(rows), BATCH):
        pixels = torch.stack(
            [transform(Image.open(row["image"]).convert("RGB")) for row in rows[start : start + BATCH]]
        )
        image.append(model.encode_image(pixels, normalize=True))
    for start in range(0, len(captions), BATCH):
        text.append(model.encode_text(tokenizer(captions[start : start + BATCH]), normalize=True))
    np.save(Path(out) / "image.npy", torch.cat(image).float().numpy())
    np.save(Path(out) / "text.npy", torch.cat(text).float().numpy())
    print(open_clip.__version__)


if __name__ == "__main__":
    main()
