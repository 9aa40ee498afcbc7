"""The public API of the package."""

import importlib

import m1clip


def test_public_names_never_change_type() -> None:
    first = m1clip.train
    assert callable(first)
    importlib.import_module("m1clip.training.run")
    assert m1clip.train is first
    assert m1clip.load is m1clip.load
