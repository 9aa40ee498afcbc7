"""`make parity`: m1clip against installed open_clip and transformers, random weights, both directions.

    python tests/parity/compare.py PEERS_PYTHON [--models ViT-S-16 ViT-B-32-quickgelu] [--json FILE] [--record FILE]

For each model: theirs -> ours (their library writes the folder, m1clip loads it) and ours -> theirs
(m1clip export writes it, their library loads it). Compared are pixels, text ids, features and the
logit scale.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[1]))

import inputs
from tiny_model import tiny_config

from m1clip.data.augment import render
from m1clip.data.images import Preprocess, to_square
from m1clip.export.layouts import convert
from m1clip.inference import load
from m1clip.inference.model import Model
from m1clip.inference.torch_encoder import TorchEncoder
from m1clip.model.clip import CLIP, build_clip
from m1clip.model.convert import hf_config, openclip_config
from m1clip.model.folder import read_model
from m1clip.model.presets import (
    PRESETS,
    Activation,
    CLIPConfig,
    HeadConfig,
    TextTowerConfig,
    VisionTowerConfig,
    with_fields,
)
from m1clip.model.siglip import hf_siglip_config, openclip_siglip_config
from m1clip.text.bpe import BpeTokenizer

PEER = Path(__file__).with_name("peer.py")
TINY = tiny_config(vocab_size=49408, context_length=24, mlp_ratio=3.0, activation="quick_gelu")
MODELS = {
    "ViT-S-16": PRESETS["ViT-S-16"],
    "ViT-B-32-quickgelu": with_fields(PRESETS["ViT-B-32"], activation="quick_gelu"),
    "ViT-B-16": PRESETS["ViT-B-16"],
    "ViT-L-14": PRESETS["ViT-L-14"],
    "tiny-fixture": TINY,
}


def siglip(
    width: int,
    layers: int,
    heads: int,
    patch: int,
    side: int,
    activation: Activation = "gelu_tanh",
    vocab_size: int = 1000,
    context: int = 64,
    **changes: Any,
) -> CLIPConfig:
    """A SigLIP with the same sizes in both towers, as those of Google have.

    Few tokens, since weights are random.
    """
    both: dict[str, Any] = {"width": width, "layers": layers, "heads": heads, "norm_eps": 1e-6}
    both |= {"activation": activation, **changes}
    return CLIPConfig(
        image_tower=VisionTowerConfig(
            **both,
            image_size=side,
            patch_size=patch,
            pooling="map",
            pre_norm=False,
            patch_bias=True,
        ),
        text_tower=TextTowerConfig(
            **both, pooling="last", vocab_size=vocab_size, context_length=context, eot_id=1
        ),
        image_head=HeadConfig(kind="identity"),
        text_head=HeadConfig(bias=True),
        embed_dim=width,
        logit_bias=True,
    )


SIGLIP_MODELS = {
    "SigLIP-B-16-224": siglip(768, 12, 12, 16, 224),
    "SigLIP-B-16-224, exact GELU": siglip(768, 12, 12, 16, 224, "gelu"),
    # Images of 384 pixels in patches of 14: the last six rows and columns have no patch.
    "SigLIP-SO400M-14-384, 4 blocks": siglip(1152, 4, 16, 14, 384, mlp_ratio=3.7362),
    "SigLIP2-B-32-256": siglip(768, 12, 12, 32, 256),
    "tiny-siglip": siglip(32, 2, 2, 8, 28, context=16),
    "tiny-siglip2": siglip(32, 2, 2, 8, 32, context=16),
}
# SigLIP of transformers with a SentencePiece model, SigLIP 2 of open_clip with Gemma's tokenizer.
SIGLIP_FIXTURES = (("hf-siglip", "tiny-siglip"), ("openclip-siglip", "tiny-siglip2"))
TOKENIZER_FILES = ("spiece.model", "tokenizer.json", "tokenizer_config.json")
CONFIG_FILES = {"hf-siglip": "config.json", "openclip-siglip": "open_clip_config.json"}
ADAPTERS = "adapters"  # models that the libraries build
TOLERANCE = 1e-5
COMPARED = ("pixels", "image", "text", "scale")
Outputs = dict[str, np.ndarray]


def ours_encoded(bundle: Model) -> Outputs:
    """The same outputs from an m1clip model."""
    squares = np.stack(
        [
            to_square(p, bundle.preprocess.image_size, bundle.preprocess.resize)
            for p in inputs.images()
        ]
    )
    with torch.inference_mode():
        pixels = render(torch.from_numpy(squares), None, bundle.preprocess)
    return {
        "pixels": pixels.numpy(),
        "ids": bundle.tokenizer.tokenize(inputs.TEXTS, bundle.clip.config.context_length),
        "image": bundle.encode_image(inputs.images()).numpy(),
        "text": bundle.encode_text(inputs.TEXTS).numpy(),
        "scale": bundle.clip.logit_scale.detach().exp().numpy(),
        "eot": np.array(bundle.tokenizer.eot_id),
        **(
            {}
            if bundle.clip.logit_bias is None
            else {"bias": bundle.clip.logit_bias.detach().numpy()}
        ),
    }


def differences(ours: Outputs, theirs: Outputs) -> dict[str, float]:
    """Largest difference of each output.

    Ids count up to the EOT token, after which nothing has an effect.
    """
    eot = int(ours["eot"])
    ids = [
        list(row[: int(np.argmax(row == eot)) + 1])
        for side in (ours, theirs)
        for row in side["ids"]
    ]
    count = len(ids) // 2
    largest_of = {"ids": float(sum(a != b for a, b in zip(ids[:count], ids[count:], strict=True)))}
    for name in (*COMPARED, *({"bias"} & set(theirs))):
        largest_of[name] = float(np.abs(ours[name].astype(np.float64) - theirs[name]).max())
    return largest_of


def with_inputs_weights(model: CLIP) -> CLIP:
    """The model with the weights of inputs.py."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(
                torch.from_numpy(np.asarray(inputs.tensor(name, tuple(parameter.shape))))
            )
    return model.eval()


def filled(shape: CLIPConfig, kind: str) -> Model:
    """A model of ours with the weights of inputs.py and the crop of the target library."""
    tokenizer = BpeTokenizer()
    model = build_clip(with_fields(shape, eot_id=tokenizer.eot_id))
    crop: Any = "shortest" if kind == "openclip" else "shortest-floor"
    return Model(
        TorchEncoder(
            with_inputs_weights(model),
            tokenizer,
            Preprocess(image_size=shape.image_size, resize=crop),
            "fp32",
        )
    )


def peer(python: str, *words: str | Path) -> None:
    done = subprocess.run(
        [python, str(PEER), *map(str, words)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, words))}\n{done.stderr[-3000:]}")


def config_of(kind: str, shape: CLIPConfig) -> dict[str, Any]:
    """Their config of a shape."""
    tokenizer = BpeTokenizer()
    return (
        openclip_config(shape)
        if kind == "openclip"
        else hf_config(shape, tokenizer.sot_id, tokenizer.eot_id)
    )


def their_model(python: str, kind: str, shape: CLIPConfig, folder: Path) -> Outputs:
    """Let their library write a model into a folder, and encode with it."""
    config = folder.with_suffix(".json")
    config.write_text(json.dumps(config_of(kind, shape)))
    peer(python, "make", kind, config, folder)
    np.save(
        folder / "ids.npy",
        BpeTokenizer().tokenize(inputs.TEXTS, shape.context_length).astype(np.int64),
    )
    return encoded(python, kind, folder)


def encoded(python: str, kind: str, folder: Path) -> Outputs:
    """Their outputs for a folder."""
    peer(python, "encode", kind, folder, folder.with_suffix(".npz"))
    return dict(np.load(folder.with_suffix(".npz")))


def check(python: str, name: str, kind: str, work: Path) -> list[dict[str, Any]]:
    """Both directions of one model and one library."""
    shape = MODELS[name]
    theirs = their_model(python, kind, shape, work / "theirs")
    differences_of = {
        f"{kind} -> m1clip": differences(
            ours_encoded(load(work / "theirs", precision="fp32")), theirs
        )
    }
    if kind == "openclip":
        differences_of["openclip .pt -> m1clip"] = differences(
            ours_encoded(load(work / "theirs" / "epoch_1.pt", precision="fp32")), theirs
        )
    ours = filled(shape, kind)
    ours.save(work / "ours")
    convert(read_model(work / "ours"), kind, work / "export")  # type: ignore[arg-type]
    differences_of[f"m1clip -> {kind}"] = differences(
        ours_encoded(ours), encoded(python, kind, work / "export")
    )
    version = str(theirs["version"])
    return [
        {"model": name, "version": version, "direction": direction, **row}
        for direction, row in differences_of.items()
    ]


def siglip_config_of(kind: str, name: str) -> dict[str, Any]:
    """Their config of a SigLIP; SigLIP 2 has Gemma's tokenizer."""
    shape = SIGLIP_MODELS[name]
    gemma = "siglip2" in name.lower()
    if kind == "hf-siglip":
        config = hf_siglip_config(shape)
        config["text_config"] |= {"pad_token_id": 0 if gemma else 1}
    else:
        config = openclip_siglip_config(shape)
        config["text_cfg"]["tokenizer_kwargs"] = {"clean": "canonicalize"}
    return {**config, "tokenizer": "gemma" if gemma else "sentencepiece"}


def make_siglip(python: str, kind: str, name: str, folder: Path) -> None:
    """Let their library write a SigLIP into a folder."""
    config = folder.with_suffix(".json")
    config.write_text(json.dumps(siglip_config_of(kind, name)))
    peer(python, "make", kind, config, folder)


def check_siglip(python: str, name: str, kind: str, work: Path) -> list[dict[str, Any]]:
    """Both directions of one SigLIP and one library."""
    folder, library = work / "theirs", kind.removesuffix("-siglip")
    make_siglip(python, kind, name, folder)
    theirs = encoded(python, kind, folder)
    ours = load(folder, precision="fp32")
    differences_of = {f"{library} -> m1clip": differences(ours_encoded(ours), theirs)}
    with_inputs_weights(ours.clip)
    ours.save(work / "ours")
    convert(read_model(work / "ours"), library, work / "export")  # type: ignore[arg-type]
    differences_of[f"m1clip -> {library}"] = differences(
        ours_encoded(ours), encoded(python, kind, work / "export")
    )
    version = str(theirs["version"])
    return [
        {"model": name, "version": version, "direction": direction, **row}
        for direction, row in differences_of.items()
    ]


def packed(data: bytes) -> str:
    """A file in a JSON string."""
    return base64.b64encode(gzip.compress(data, mtime=0)).decode("ascii")


def recorded(made: Outputs, weights: Path) -> dict[str, Any]:
    """What the fixture has of any model: names, shapes and features."""
    tensors = load_file(weights)
    names = [name for name in ("image", "text", "scale", "bias") if name in made]
    return {
        "version": str(made["version"]),
        "tensors": {name: list(tensor.shape) for name, tensor in tensors.items()},
        "pixels_7_5": made["pixels"][:, :, ::7, ::5].astype(np.float64).round(6).tolist(),
        "ids": made["ids"].tolist(),
        **{key: made[key].astype(np.float64).round(8).tolist() for key in names},
    }


def record(python: str, path: Path) -> None:
    """The fixture of `make test`: tiny models, and their features as the libraries compute them."""
    fixture = {}
    for kind in ("openclip", "hf"):
        with tempfile.TemporaryDirectory() as work:
            folder = Path(work) / "m"
            made = their_model(python, kind, TINY, folder)
            weights = next(folder.glob("*model.safetensors"))
            fixture[kind] = {"config": config_of(kind, TINY), **recorded(made, weights)}
    for kind, name in SIGLIP_FIXTURES:
        with tempfile.TemporaryDirectory() as work:
            folder = Path(work) / "m"
            make_siglip(python, kind, name, folder)
            made = encoded(python, kind, folder)
            weights = next(folder.glob("*model.safetensors"))
            files = [path for path in folder.iterdir() if path.name in TOKENIZER_FILES]
            fixture[kind] = {
                "files": {path.name: packed(path.read_bytes()) for path in files},
                "config": json.loads((folder / CONFIG_FILES[kind]).read_text("utf-8")),
                "preprocess": None,
                **recorded(made, weights),
            }
            processor = folder / "preprocessor_config.json"
            if processor.is_file():
                fixture[kind]["preprocess"] = json.loads(processor.read_text("utf-8"))
    path.write_text(json.dumps(fixture) + "\n")


def adapter_rows(python: str) -> list[dict[str, Any]]:
    """Models that open_clip and transformers build: m1clip runs in the environment that has them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        command = [python, str(PEER.with_name("adapters.py")), str(path)]
        environment = {**os.environ, "PYTHONPATH": str(PEER.parents[2])}
        subprocess.run(command, check=True, env=environment, stderr=subprocess.DEVNULL)
        rows_of_adapters: list[dict[str, Any]] = json.loads(path.read_text())
        return rows_of_adapters


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write the rows; those of models that were not compared this time stay."""
    path.parent.mkdir(parents=True, exist_ok=True)
    before = json.loads(path.read_text())["rows"] if path.is_file() else []
    compared = {row["model"] for row in rows}
    others = [row for row in before if row["model"] not in compared]
    path.write_text(json.dumps({"tolerance": TOLERANCE, "rows": others + rows}, indent=2) + "\n")


def main() -> None:
    """Print the table; exit code 1 if a difference exceeds the tolerance."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("peers", help="a Python that has open_clip, torchvision and transformers")
    every = [name for name in (*MODELS, *SIGLIP_MODELS) if not name.startswith("tiny")]
    every.append(ADAPTERS)
    parser.add_argument("--models", nargs="+", default=every)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    if options.record:
        record(options.peers, options.record)
        return
    rows: list[dict[str, Any]] = []
    print(
        f"{'model':30} {'direction':24} {'ids':>4} {'pixels':>9} {'image':>9} {'text':>9}"
        f" {'scale':>9}"
    )
    for name in options.models:
        for kind in ("openclip", "hf") if name != ADAPTERS else ():
            with tempfile.TemporaryDirectory() as folder:
                if name in SIGLIP_MODELS:
                    differences_of = check_siglip(
                        options.peers, name, f"{kind}-siglip", Path(folder)
                    )
                else:
                    differences_of = check(options.peers, name, kind, Path(folder))
            for row in differences_of:
                numbers = " ".join(f"{row[key]:9.1e}" for key in COMPARED)
                print(f"{name:30} {row['direction']:24} {row['ids']:4.0f} {numbers}", flush=True)
            rows += differences_of
    if ADAPTERS in options.models:
        rows += adapter_rows(options.peers)
    if options.json:
        write_rows(options.json, rows)
    worst = max(
        max(row["ids"], *(row[key] / TOLERANCE for key in (*COMPARED, "bias") if key in row))
        for row in rows
    )
    print(f"largest difference: {worst * TOLERANCE:.1e} (allowed {TOLERANCE:.0e})")
    sys.exit(worst > 1)


if __name__ == "__main__":
    main()
