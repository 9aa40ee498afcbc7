"""What one picture is, or what is wrong with it: read once, decoded once."""

from __future__ import annotations

import os
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from PIL import Image

from m1clip.data.images import BadImage, decode, opened
from m1clip.data.pair import ImageRef

_FORMAT_OF = {
    **dict.fromkeys((".jpg", ".jpeg", ".jpe", ".jfif"), "JPEG"),
    **dict.fromkeys((".tif", ".tiff"), "TIFF"),
    **dict.fromkeys((".bmp", ".dib"), "BMP"),
    **{".png": "PNG", ".webp": "WEBP", ".gif": "GIF"},
}
THUMB_SIDE = 16
# Enough for a hash of 9 x 9 and for telling a flat picture; JPEG decodes at a fraction of its size.
_LOOK_SIDE = 36
_PNG_DEPTH_AT = 24
_TIFF_DEPTH_TAG = 258


@dataclass(frozen=True, slots=True)
class PictureFacts:
    """`fault` is a kind of BadImage; the other fields hold only where it is None."""

    fault: str | None = None
    reason: str = ""
    format: str = ""
    width: int = 0
    height: int = 0
    traits: tuple[str, ...] = ()
    wrong_suffix: bool = False
    digest: bytes = b""
    look: bytes = b""
    thumb: bytes = b""
    contrast: float = 0.0


def inspect(ref: ImageRef) -> PictureFacts:
    """Read, hash, check and decode one picture."""
    where = str(ref)
    try:
        read = getattr(ref, "read", None)
        if read is None:
            image = ref.open()
            return _facts(image, image.tobytes(), "", image.size, ())
        data = read()
        with opened(data, where) as header:
            kind, size, traits = header.format or "", header.size, _traits(header, data)
        suffix = _FORMAT_OF.get(os.path.splitext(where)[1].lower())
        return _facts(decode(data, _LOOK_SIDE, where), data, kind, size, traits, suffix not in (None, kind))
    except BadImage as error:
        return PictureFacts(fault=error.kind, reason=error.reason)


def _facts(
    image: Image.Image,
    data: bytes,
    kind: str,
    size: tuple[int, int],
    traits: tuple[str, ...],
    wrong: bool = False,
) -> PictureFacts:
    grey = image.convert("L")
    thumb = np.asarray(grey.resize((THUMB_SIDE, THUMB_SIDE), Image.Resampling.BOX))
    digest = blake2b(data, digest_size=16).digest()
    contrast = float(thumb.astype(np.float32).std())
    return PictureFacts(
        None, "", kind, *size, traits, wrong, digest, look_hash(grey), thumb.tobytes(), contrast
    )


def look_hash(grey: Image.Image) -> bytes:
    """dHash of 128 bits: whether brightness grows to the right and downwards, on a grid of 8 x 8."""
    small = np.asarray(grey.resize((9, 9), Image.Resampling.BOX), np.int16)
    right = small[:8, 1:] > small[:8, :8]
    down = small[1:, :8] > small[:8, :8]
    return np.packbits(np.concatenate([right.ravel(), down.ravel()])).tobytes()


def _traits(image: Image.Image, data: bytes) -> tuple[str, ...]:
    """What is converted when the picture is used."""
    mode = image.mode
    depth = image.tag_v2.get(_TIFF_DEPTH_TAG, (8,)) if image.format == "TIFF" else (8,)  # type: ignore[attr-defined]
    found = {
        "CMYK": mode == "CMYK",
        "16-bit": mode.startswith(("I", "F"))
        or (image.format == "PNG" and data[_PNG_DEPTH_AT : _PNG_DEPTH_AT + 1] == b"\x10")
        or (isinstance(depth, tuple) and any(isinstance(d, int) and d > 8 for d in depth)),
        "palette": mode in {"P", "PA"},
        "alpha": mode in {"RGBA", "LA", "La", "PA", "RGBa"} or "transparency" in image.info,
        "animated": _animated(image),
        "grey": mode in {"1", "L"},
    }
    return tuple(name for name, holds in found.items() if holds)


def _animated(image: Image.Image) -> bool:
    try:
        return bool(getattr(image, "is_animated", False))
    except (EOFError, LookupError, OSError, SyntaxError, TypeError, ValueError):
        return False
