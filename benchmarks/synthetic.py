"""Images a second of the synthetic generator on one core: cold (caches empty) and warm."""

from __future__ import annotations

import argparse
import platform
import statistics
import time

import numpy as np
import PIL

from m1clip.data.synthetic.drawing import background, sprite
from m1clip.data.synthetic.source import SyntheticSource


def images_per_second(source: SyntheticSource) -> float:
    """Open every train image once."""
    samples = source.samples("train")
    start = time.perf_counter()
    for sample in samples:
        sample.image.open()
    return len(samples) / (time.perf_counter() - start)


def main() -> None:
    """Print one line a size: the cold round, then median and range of the warm ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=1000, help="images in a round")
    parser.add_argument("--rounds", type=int, default=7, help="warm rounds")
    options = parser.parse_args()
    versions = f"numpy {np.__version__}, Pillow {PIL.__version__}"
    print(f"{platform.machine()}, Python {platform.python_version()}, {versions}, one core")
    for size in (64, 112, 224):
        background.cache_clear()
        sprite.cache_clear()
        source = SyntheticSource(size, train=options.images, val=0, test=0)
        cold = images_per_second(source)
        warm = [images_per_second(source) for _ in range(options.rounds)]
        print(
            f"{size:>4} px: {statistics.median(warm):,.0f} images/s (median of n={len(warm)} rounds of "
            f"{options.images}, range {min(warm):,.0f} to {max(warm):,.0f}); first round {cold:,.0f}"
        )


if __name__ == "__main__":
    main()
