"""Pretrained towers of other projects.

Weights come from installed packages, folders or files; the hub is used only with --download.
"""
