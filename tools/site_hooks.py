"""What mkdocs does with the pages of docs/ so that they read well here, on the site and in the repository.

- Comments for the tests (`<!-- test: ... -->`) are left out.
- The mark ¶ of a title in a notebook is left out, which the search would show.
- Links to files outside docs/ (`../CONTRIBUTING.md`) go to the repository, if the file exists.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

REPOSITORY = Path(__file__).resolve().parent.parent
COMMENT = re.compile(r"^<!-- (?:test|generated)[^\n]*-->\n", re.MULTILINE)
ANCHOR = re.compile(r'<a class="anchor-link"[^>]*>¶</a>')
LINK = re.compile(r"\]\((?P<target>(?:\.\./|results/)[^)#\s]*)(?P<anchor>#[^)\s]*)?\)")
SHOWN = (
    "results/comparison.html",
    "results/report.html",
)  # files beside the pages that the site contains


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Prepare the text of a page before it is rendered."""
    folder = Path(page.file.abs_src_path).parent

    def outside(match: re.Match[str]) -> str:
        target, anchor = match["target"], match["anchor"] or ""
        path = (folder / target).resolve()
        if target in SHOWN or _is_page(path, Path(config["docs_dir"])):
            return match[0]
        if not path.exists():
            raise PluginError(f"{page.file.src_path}: no such file: {target}")
        kind = "tree" if path.is_dir() else "blob"
        name = path.relative_to(REPOSITORY).as_posix()
        return f"]({config['repo_url']}/{kind}/main/{name}{anchor})"

    return LINK.sub(outside, COMMENT.sub("", markdown))


def on_page_content(html: str, **_: Any) -> str:
    """Prepare a page after it was rendered."""
    return ANCHOR.sub("", html)


def _is_page(path: Path, docs: Path) -> bool:
    """Whether mkdocs itself renders or copies this file."""
    inside = path.is_relative_to(docs)
    return inside and not path.is_relative_to(docs / "results") and path.is_file()
