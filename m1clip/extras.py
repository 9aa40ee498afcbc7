"""Optional libraries, which the extras of the package install."""

import importlib
from typing import Any

from m1clip.errors import UserError


def require(module: str, purpose: str, extra: str = "data") -> Any:
    """Import an optional library; UserError with install instructions if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise UserError(
            f"{purpose} needs the library {name}: pip install 'm1clip[{extra}]'"
        ) from error
