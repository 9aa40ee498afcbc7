"""Tensor files: what is written is read back by the library, and the hash is that of the file."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from m1clip.model.weights import TYPE_NAMES, write_tensors


def test_every_type_and_shape_is_read_back(tmp_path: Path) -> None:
    tensors = {
        f"{str(dtype).removeprefix('torch.')}.{index}": torch.arange(12).to(dtype)[:count]
        for dtype in TYPE_NAMES
        for index, count in enumerate((12, 1, 0))
    }
    tensors["scalar"] = torch.tensor(3.5)
    tensors["strided"] = torch.arange(12.0).reshape(3, 4).t()
    tensors["ünïcode"] = torch.ones(2, 3, requires_grad=True)
    path = tmp_path / "a.safetensors"
    digest = write_tensors(path, tensors, {"format": "pt"})
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    read_back = load_file(path)
    assert read_back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read_back[name].dtype == tensor.dtype
        assert torch.equal(read_back[name], tensor), name
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_tensors_are_aligned(tmp_path: Path) -> None:
    """Programs map the file and use its tensors in place."""
    path = tmp_path / "a.safetensors"
    write_tensors(
        path, {"a": torch.ones(3, dtype=torch.uint8), "b": torch.ones(2), "é": torch.ones(1)}
    )
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    header = json.loads(data[8 : 8 + length])
    assert [header[name]["data_offsets"] for name in ("b", "é", "a")] == [[0, 8], [8, 12], [12, 15]]


def test_unwritable_file_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_tensors(tmp_path / "missing" / "a.safetensors", {"a": torch.ones(3)})


def test_tensors_that_are_mapped_from_a_file_can_replace_it(tmp_path: Path) -> None:
    """Truncating a mapped file would end the process with SIGBUS."""
    path = tmp_path / "weights.safetensors"
    expected = {"a": torch.arange(100_000.0), "b": torch.ones(3, dtype=torch.int64)}
    write_tensors(path, expected)
    mapped = load_file(path)
    assert write_tensors(path, mapped) == hashlib.sha256(path.read_bytes()).hexdigest()
    for name, tensor in load_file(path).items():
        assert torch.equal(tensor, expected[name])
