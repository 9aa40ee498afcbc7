"""The error type for users: what happened, where, and what to do next; other errors in one line."""

# A test compares it with pyproject.toml.
DOCS_URL = "https://m1clip.github.io/m1clip"


def docs_page(name: str, section: str = "") -> str:
    """The address of a page of the documentation, such as `docs_page("export")`."""
    anchor = f"#{section}" if section else ""
    return f"{DOCS_URL}/{name}/{anchor}"


class UserError(Exception):
    """A problem that the user can fix. The CLI prints it as one line and exits with code 2.

    Notes of the error (`add_note`) are printed below that line: what to do, if there are many ways.
    """


def first_line(error: BaseException) -> str:
    """Return the first line of the message of an error in another library."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
