"""Where the cache of pictures lies: in the folder asked for, beside the data, or in the user's cache folder."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from m1clip.errors import UserError

FOLDER = ".m1clip-cache"


def cache_folder(asked: str | None, beside: Path | None) -> Path:
    """The folder asked for; else beside the data; else, where that cannot be written, the user's cache folder."""
    places = [Path(asked).expanduser()] if asked else [*([beside / FOLDER] if beside else []), user_cache()]
    reason = ""
    for place in places:
        try:
            place.mkdir(parents=True, exist_ok=True)
            probe = place / f".{os.getpid()}.probe"
            probe.touch()
            probe.unlink()
        except OSError as error:
            reason = f"{place}: {error.strerror or error}"
        else:
            return place
    raise UserError(
        f"no place for the cache of pictures ({reason}); name one with --data.cache-dir, or --data.cache ram"
    )


def user_cache() -> Path:
    """Where programs of this system keep what they can make again."""
    asked = os.environ.get("XDG_CACHE_HOME")
    if asked and os.path.isabs(asked):
        return Path(asked) / "m1clip"
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "m1clip"


def free_bytes(folder: Path) -> int:
    """Room on the disk that a folder is on."""
    return shutil.disk_usage(folder).free
