"""The readme of the built package: without links to files of the repository, which would break on a package index."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

ABSOLUTE = r"(?!https?:|#)"  # is not the start of a relative link
IMAGE = re.compile(rf"!\[[^\]]*\]\({ABSOLUTE}[^)]*\)\n*")
LINK = re.compile(rf"\[([^\]]*)\]\({ABSOLUTE}[^)]*\)")


def without_relative_links(readme: str) -> str:
    """Markdown with plain text in place of relative links, and without the images of the repository."""
    return LINK.sub(r"\1", IMAGE.sub("", readme))


class ReadmeHook(MetadataHookInterface):
    """Sets the field `readme`, which pyproject.toml lists as dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": without_relative_links(text)}
