"""Random numbers as a function of (seed, epoch, sample): a resume needs only the step number."""

import functools

import numpy as np

# One stream for each use.
(
    CAPTION,
    CROP_AREA,
    CROP_ASPECT,
    CROP_X,
    CROP_Y,
    FLIP,
    BRIGHTNESS,
    CONTRAST,
    REPLACEMENT,
    PATCH,
    WORD,
    MIX,
    MIX_AREA,
    MIX_X,
    MIX_Y,
) = range(15)

SHUFFLE_WINDOW = 65_536  # samples that are shuffled together


@functools.lru_cache(maxsize=2)
def permutation(seed: int, epoch: int, count: int) -> np.ndarray:
    """The order of an epoch; cached, because each step of the epoch needs it."""
    order = np.random.Generator(
        np.random.Philox(key=np.array([seed, epoch], np.uint64))
    ).permutation(count)
    order.flags.writeable = False
    return order


def windowed_order(seed: int, epoch: int, blocks: np.ndarray, first: int, last: int) -> np.ndarray:
    """Samples first .. last - 1 of an epoch in which neighbours stay near each other, for data that
    is streamed.

    `blocks` are sizes of groups of neighbours. The blocks are shuffled, then the samples in each
    window of WINDOW of them: each sample comes once, and memory does not grow with the number of
    samples.
    """
    order = permutation(seed, epoch, len(blocks))
    starts, ends = (np.cumsum(blocks) - blocks)[order], np.cumsum(blocks[order])
    windows = range(first // SHUFFLE_WINDOW, -(-last // SHUFFLE_WINDOW))
    sizes = [min(SHUFFLE_WINDOW, int(ends[-1]) - number * SHUFFLE_WINDOW) for number in windows]
    shuffled = [
        n * SHUFFLE_WINDOW + _window(seed, epoch, n, size)
        for n, size in zip(windows, sizes, strict=True)
    ]
    positions = np.concatenate(shuffled)[first - windows[0] * SHUFFLE_WINDOW :][: last - first]
    block = np.searchsorted(ends, positions, side="right")
    return starts[block] + positions - (ends - blocks[order])[block]


@functools.lru_cache(maxsize=4)
def _window(seed: int, epoch: int, number: int, size: int) -> np.ndarray:
    key, counter = np.array([seed, epoch], np.uint64), np.array([0, 0, number + 1, 0], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter)).permutation(size)


def bits(seed: int, epoch: int, samples: np.ndarray, stream: int) -> np.ndarray:
    """A 64-bit hash for each sample: splitmix64 over the four integers."""
    with np.errstate(over="ignore"):
        # Hashed alone, or seed 1 epoch 0 would equal seed 0 epoch 1.
        state = _splitmix(np.array(seed, np.uint64))
        for word in (epoch, stream):
            state = _splitmix(state ^ np.uint64(word))
        return _splitmix(_splitmix(samples.astype(np.uint64) ^ state))


def uniform(seed: int, epoch: int, samples: np.ndarray, stream: int) -> np.ndarray:
    """A number in [0, 1) for each sample."""
    return (bits(seed, epoch, samples, stream) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _splitmix(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(x ^ (x >> np.uint64(31)))
