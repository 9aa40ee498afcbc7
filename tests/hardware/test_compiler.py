"""What stands in the way of torch.compile is known before it is tried."""

from __future__ import annotations

import pytest

from m1clip.errors import UserError
from m1clip.hardware import device as compiler
from m1clip.hardware.device import check_compile, compile_obstacle


def test_the_obstacles() -> None:
    assert compile_obstacle("cpu", "/opt/venv/torch", "g++", triton=False) == ""
    assert "C++ compiler" in compile_obstacle("cpu", "/opt/venv/torch", None, triton=False)
    assert "has a space" in compile_obstacle("cpu", "/home/me/my code/torch", "g++", triton=False)
    assert compile_obstacle("cuda", "/home/me/my code/torch", None, triton=True) == ""
    assert "triton" in compile_obstacle("cuda", "/opt/venv/torch", "g++", triton=False)
    assert compile_obstacle("mps", "/opt/venv/torch", None, triton=False) == ""


def test_a_missing_compiler_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(compiler.shutil, "which", lambda name: None)
    with pytest.raises(UserError, match="cannot work here: it needs a C"):
        check_compile("cpu")
    check_compile("mps")
