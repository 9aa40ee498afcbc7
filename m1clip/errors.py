"""The error type for users: what happened, where, and what to do next; other errors in one line."""


class UserError(Exception):
    """A problem that the user can fix. The CLI prints it as one line and exits with code 2."""


def first_line(error: BaseException) -> str:
    """Return the first line of the message of an error in another library."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
