"""Towers that others have trained: the two that need no hub, and what is known of each."""
