"""The error type for user-facing messages: what happened, where, and what to do next.

Other errors in one line.
"""


class UserError(Exception):
    """A problem that the user can fix. The CLI prints it as one line and exits with code 2."""


def first_line(error: BaseException) -> str:
    """What went wrong in another library, for a message of one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
