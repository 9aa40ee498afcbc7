"""The error type for user-facing messages: what happened, where, and what to do next."""

from __future__ import annotations


class UserError(Exception):
    """A problem that the user can fix. The CLI prints it as one line and exits with code 2."""
