"""The one error a person is meant to read: what happened, where, what to do next."""

from __future__ import annotations


class UserError(Exception):
    """A problem the person can fix. The CLI prints it as one line and exits with code 2."""
