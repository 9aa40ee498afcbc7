"""Pretrained towers of other projects.

Weights come from installed packages, folders or files; nothing is downloaded.
"""
