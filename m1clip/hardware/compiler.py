"""Whether torch.compile can work here at all, said before a run and not as a page of its errors."""

from __future__ import annotations

import importlib.util
import os
import shutil

from m1clip.errors import UserError


def compile_obstacle(kind: str, torch_folder: str, compiler: str | None, triton: bool) -> str:
    """Why torch.compile cannot work for a device, in words; empty when nothing is known against it."""
    if kind == "cuda" and not triton:
        return "it needs triton, which torch brings on Linux (Windows: pip install triton-windows)"
    if kind != "cpu":
        return ""  # Metal brings its own compiler
    if compiler is None:
        return "it needs a C++ compiler, and none is installed (Linux: g++; macOS: xcode-select --install)"
    if any(letter.isspace() for letter in torch_folder):
        return f"torch hands its own path to the linker, and {torch_folder} has a space in it"
    return ""


def check_compile(kind: str) -> None:
    """Refuse --model.compile where it would fail."""
    import torch

    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    triton = importlib.util.find_spec("triton") is not None
    obstacle = compile_obstacle(kind, os.path.dirname(torch.__file__), compiler, triton)
    if obstacle:
        raise UserError(f"--model.compile cannot work here: {obstacle}; leave it out, or mend that")
