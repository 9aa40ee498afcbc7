"""How images look: a hash and a small gray thumbnail, and the pairs of images that are
near-duplicates.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from PIL import Image

LOOK_BYTES, _THUMB_SIDE = 16, 16
THUMB_BYTES = _THUMB_SIDE**2
# Chosen by eye on Flickr8k: the 7 pairs within these limits are one image or one scene; looser
# limits add pairs of sky and fog. Of 1,000 of its images, copies that were re-encoded, resized,
# brightened or made gray were all found; of those cropped by 8% on each side 228, of mirrored ones
# 5.
MAX_BITS = 32  # of 128 that differ
MIN_CORRELATION = 0.8
MIN_DETAIL_CORRELATION = 0.55
MIN_CONTRAST = 6.0  # flat images all look alike
MAX_ALL_PAIRS = 200_000  # above, comparing all pairs takes longer than decoding the images


def appearance(image: Image.Image) -> tuple[bytes, bytes]:
    """(hash of how an image looks, gray thumbnail), by which `near_duplicates` compares images.

    The hash is a dHash of 128 bits: whether brightness grows to the right and downwards, on a grid
    of 8 x 8.
    """
    gray = image.convert("L")
    small = np.asarray(gray.resize((9, 9), Image.Resampling.BOX), np.int16)
    right, down = small[:8, 1:] > small[:8, :8], small[1:, :8] > small[:8, :8]
    perceptual_hash = np.packbits(np.concatenate([right.ravel(), down.ravel()])).tobytes()
    return perceptual_hash, gray.resize((_THUMB_SIDE, _THUMB_SIDE), Image.Resampling.BOX).tobytes()


def near_duplicates(images: Sequence[tuple[bytes, bytes]]) -> Iterator[list[int]]:
    """Pairs (i < j) of images (hash, thumbnail) that look alike, regardless of size and format.

    An image that cannot be decoded has b"" for both. None above MAX_ALL_PAIRS images.
    """
    usable = np.array([i for i, (perceptual_hash, _) in enumerate(images) if perceptual_hash], int)
    looks, thumbs = (
        np.frombuffer(b"".join(image[part] for image in images), np.uint8) for part in (0, 1)
    )
    looks, thumbs = looks.reshape(-1, LOOK_BYTES), thumbs.reshape(-1, _THUMB_SIDE, _THUMB_SIDE)
    distinct = thumbs.std(axis=(1, 2)) >= MIN_CONTRAST
    usable, looks, thumbs = usable[distinct], looks[distinct], thumbs[distinct]
    if not 1 < len(usable) <= MAX_ALL_PAIRS:
        return
    signs = np.unpackbits(looks, axis=1).astype(np.float32) * 2 - 1
    for start in range(0, len(usable), 256):
        # Bits that agree minus bits that differ.
        i, j = np.nonzero(
            signs[start : start + 256] @ signs[start:].T >= signs.shape[1] - 2 * MAX_BITS
        )
        pairs = np.stack([i[i < j], j[i < j]]) + start
        for part in np.array_split(pairs, len(pairs[0]) // 2**14 + 1, axis=1):  # a video has many
            (gray1, detail1), (gray2, detail2) = (_unit_vectors(thumbs[index]) for index in part)
            alike = (gray1 * gray2).sum(1) >= MIN_CORRELATION
            alike &= (detail1 * detail2).sum(1) >= MIN_DETAIL_CORRELATION
            yield from usable[part[:, alike]].T.tolist()


def _unit_vectors(thumbs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Thumbnails as unit vectors: as they are, and without the broad shades of sky or fog."""
    gray = thumbs.astype(np.float32)
    padded = np.pad(gray, ((0, 0), (2, 2), (2, 2)), mode="edge")
    shades = (
        sum(padded[:, y : y + _THUMB_SIDE, x : x + _THUMB_SIDE] for y in range(5) for x in range(5))
        / 25
    )
    pair = (
        pixels.reshape(-1, _THUMB_SIDE**2)
        for pixels in (gray - gray.mean(axis=(1, 2), keepdims=True), gray - shades)
    )
    plain, detail = (
        values / np.maximum(np.linalg.norm(values, axis=1, keepdims=True), 1e-6) for values in pair
    )
    return plain, detail
