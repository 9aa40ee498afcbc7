"""Images per second of open_clip's CSV loader. Runs in a Python that has open_clip; driven line by line by loader.py.

Arguments: CSV (tab separated: filepath, title), image size, batch, workers. For each line `N` on
standard input it takes N batches and answers with images per second, after the batches that were
prefetched. `stop` ends it.
"""

from __future__ import annotations

import json
import sys
import time
from types import SimpleNamespace

import torchvision_ops  # noqa: F401  first: open_clip imports torchvision

# isort: split
import open_clip
from open_clip_train.data import get_csv_dataset

PREFETCH = 2  # batches that each worker of a torch DataLoader holds ready


def main() -> None:
    """Serve rounds until asked to stop."""
    table, size, batch, workers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    options = SimpleNamespace(
        train_data=table, csv_img_key="filepath", csv_caption_key="title", csv_separator="\t",
        batch_size=batch, workers=workers, distributed=False,
    )  # fmt: skip
    transform = open_clip.image_transform(size, is_train=True)
    tokenizer = open_clip.get_tokenizer("ViT-B-32")
    loader = get_csv_dataset(options, transform, is_train=True, tokenizer=tokenizer).dataloader
    feed = iter(loader)
    next(feed)

    def images_per_second(count: int) -> float:
        for _ in range(PREFETCH * workers):
            next(feed)
        start = time.perf_counter()
        for _ in range(count):
            next(feed)
        return count * batch / (time.perf_counter() - start)

    for line in map(str.strip, sys.stdin):
        answer = images_per_second(int(line)) if line.isdecimal() else open_clip.__version__
        print(json.dumps({"answer": answer}), flush=True)
        if line == "stop":
            break


if __name__ == "__main__":
    main()
