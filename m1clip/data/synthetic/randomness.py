"""Randomness as a function of integers alone."""

from __future__ import annotations

import numpy as np

# one number a purpose, so that two purposes never share a stream
SCENES, PLACEMENT, CAPTIONS, NEGATIVES, PICTURE = range(1, 6)


def generator(purpose: int, *numbers: int) -> np.random.Generator:
    """A Philox generator keyed by a purpose and any non-negative integers."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((purpose, *numbers))))


def derive(purpose: int, *numbers: int) -> int:
    """A 64-bit seed from integers: what one picture's randomness hangs on."""
    high, low = np.random.SeedSequence((purpose, *numbers)).generate_state(2)
    return int(high) << 32 | int(low)
