"""Addresses that messages and help name. A test compares them with pyproject.toml."""

REPOSITORY_URL = "https://github.com/m1clip/m1clip"
DOCS_URL = "https://m1clip.github.io/m1clip"


def docs_page(name: str, section: str = "") -> str:
    """The address of a page of the documentation, such as `docs_page("export")`."""
    anchor = f"#{section}" if section else ""
    return f"{DOCS_URL}/{name}/{anchor}"
