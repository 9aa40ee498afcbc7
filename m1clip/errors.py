"""The error type for user-facing messages: what happened, where, and what to do next; other errors in one line."""

import re
from pathlib import Path

# Such as openai/clip-vit-base-patch32.
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class UserError(Exception):
    """A problem that the user can fix. The CLI prints it as one line and exits with code 2."""


def first_line(error: BaseException) -> str:
    """What went wrong in another library, for a message of one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]


def hub_hint(name: str | Path) -> str:
    """The end of an error about a missing model that looks like a name on the Hugging Face Hub; else ""."""
    text = str(name).removeprefix("hf-hub:")
    owner, _, model = text.partition("/")
    if not HUB_NAME.fullmatch(text) or owner == "runs" or Path(owner).exists():
        return ""
    return (
        f"; if it is a name on the Hugging Face Hub: m1clip downloads nothing by itself, so first run "
        f"hf download {text} --local-dir {model} (pip install huggingface_hub), then use the folder {model}"
    )
