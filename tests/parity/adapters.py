"""Models that open_clip and transformers build for m1clip, against the libraries themselves; run by compare.py.

    PEERS_PYTHON tests/parity/adapters.py OUT.json

Runs in the environment of the peers, with m1clip on PYTHONPATH. Weights are random; sizes are small
where the name says so. Compared are ids, pixels and features, then the features of the saved
folder, and those of the ONNX export.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "benchmarks" / "peers")]

import inputs  # noqa: E402
import numpy as np  # noqa: E402
import tokenizer_files  # noqa: E402
import torch  # noqa: E402
import torchvision_ops  # noqa: E402, F401  first: open_clip and transformers import torchvision

import m1clip  # noqa: E402
from m1clip.data.augment import render  # noqa: E402
from m1clip.data.images import to_square  # noqa: E402
from m1clip.export.layouts import convert  # noqa: E402
from m1clip.inference.model import Model  # noqa: E402
from m1clip.model.folder import read_model  # noqa: E402

SMALL_TEXT = {"context_length": 77, "vocab_size": 49408, "width": 64, "heads": 2, "layers": 2}
OPENCLIP_MODELS: dict[str, dict[str, Any] | None] = {
    "MobileCLIP2-S0": None,
    "RN50": None,
    "ConvNeXt (pico), small text": {
        "embed_dim": 64,
        "vision_cfg": {"timm_model_name": "convnext_pico", "image_size": 96, "timm_pool": "avg"},
        "text_cfg": SMALL_TEXT,
    },
    "ViT (timm), RoBERTa text, small": {
        "embed_dim": 64,
        "vision_cfg": {"timm_model_name": "vit_tiny_patch16_224", "image_size": 224},
        "text_cfg": {
            "hf_model_name": "roberta-small",
            "hf_tokenizer_name": "roberta-small",
            "hf_proj_type": "mlp",
            "hf_pooler_type": "mean_pooler",
            "context_length": 32,
        },
    },
}
BERT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
BERT |= {"intermediate_size": 64, "vocab_size": 400}
VIT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
VIT |= {"intermediate_size": 64, "image_size": 32, "patch_size": 8}
TRANSFORMERS_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "ChineseCLIP, small": (
        "ChineseCLIP",
        {"text_config": BERT, "vision_config": VIT, "projection_dim": 24},
    ),
    "ALIGN, small": (
        "Align",
        {
            "text_config": {**BERT, "max_position_embeddings": 64},
            "vision_config": {"image_size": 64, "hidden_dim": 160, "width_coefficient": 0.5},
            "projection_dim": 160,
        },
    ),
    "MetaCLIP 2, small": (
        "MetaClip2",
        {
            "text_config": {**BERT, "projection_dim": 24, "eos_token_id": 1, "hidden_act": "gelu"},
            "vision_config": {**VIT, "projection_dim": 24, "hidden_act": "gelu"},
            "projection_dim": 24,
        },
    ),
    "CLIPSeg, small": (
        "CLIPSeg",
        {
            "text_config": {**BERT, "projection_dim": 24, "eos_token_id": 1},
            "vision_config": {**VIT, "projection_dim": 24},
            "projection_dim": 24,
        },
    ),
}


def fill(model: torch.nn.Module) -> None:
    """Weights by their names; variances stay above 0."""
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                values = torch.from_numpy(np.asarray(inputs.tensor(name, tuple(tensor.shape))))
                tensor.copy_(values.abs() + 0.5 if "running_var" in name else values)
            if name == "temperature":
                tensor.fill_(0.05)


def write_openclip(name: str, folder: Path) -> dict[str, np.ndarray]:
    """A folder as open_clip has it, and what open_clip computes."""
    import open_clip
    from safetensors.torch import save_file

    config = OPENCLIP_MODELS[name] or open_clip.get_model_config(name)
    assert config is not None
    folder.mkdir()
    if "hf_tokenizer_name" in config["text_cfg"]:
        from transformers import RobertaConfig

        tokenizer_files.write_gemma(folder, "PreTrainedTokenizerFast")
        shape = RobertaConfig(**{**BERT, "pad_token_id": 0, "max_position_embeddings": 64})
        shape.save_pretrained(folder)
        config["text_cfg"]["hf_model_name"] = str(folder)
    preprocess_config = {
        "mean": (0.0, 0.0, 0.0),
        "std": (1.0, 1.0, 1.0),
        "interpolation": "bilinear",
    }
    (folder / "open_clip_config.json").write_text(
        json.dumps({"model_cfg": config, "preprocess_cfg": preprocess_config})
    )
    built = {key: value for key, value in config.items() if key != "custom_text"}
    for part in ("text_cfg", "vision_cfg"):
        built[part] = dict(built[part])
    if "hf_model_name" in built["text_cfg"]:
        built["text_cfg"]["hf_model_pretrained"] = False
        config["text_cfg"]["hf_model_pretrained"] = False
        (folder / "open_clip_config.json").write_text(
            json.dumps({"model_cfg": config, "preprocess_cfg": preprocess_config})
        )
    kind = open_clip.CustomTextCLIP
    if not config.get("custom_text") and "hf_model_name" not in config["text_cfg"]:
        kind = open_clip.CLIP
    model = kind(**built).eval()
    fill(model)
    save_file(
        {key: tensor.contiguous() for key, tensor in model.state_dict().items()},
        folder / "open_clip_model.safetensors",
    )
    loaded, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    loaded.eval()
    tokens = open_clip.get_tokenizer(f"local-dir:{folder}")(inputs.TEXTS)
    pixels = torch.stack([preprocess(image) for image in inputs.images()])
    return {
        "version": np.array(open_clip.__version__),
        "ids": tokens.numpy(),
        "pixels": pixels.numpy(),
        "image": loaded.encode_image(pixels, normalize=True).numpy(),
        "text": loaded.encode_text(tokens, normalize=True).numpy(),
        "scale": loaded.logit_scale.exp().numpy(),
    }


def write_transformers(name: str, folder: Path) -> dict[str, np.ndarray]:
    """A folder as transformers writes it, and what transformers computes."""
    import transformers
    from transformers import AutoTokenizer, CLIPImageProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    family, config = TRANSFORMERS_MODELS[name]
    model = getattr(transformers, f"{family}Model")(
        getattr(transformers, f"{family}Config")(**config)
    )
    fill(model)
    model.eval().save_pretrained(folder)
    side = config["vision_config"]["image_size"]
    CLIPImageProcessor(
        size={"shortest_edge": side}, crop_size={"height": side, "width": side}
    ).save_pretrained(folder)
    tokenizer_files.write_gemma(folder, "PreTrainedTokenizerFast")
    context = min(77, model.config.text_config.max_position_embeddings)
    made = AutoTokenizer.from_pretrained(folder, padding_side="right")(
        inputs.TEXTS, padding="max_length", truncation=True, max_length=context, return_tensors="pt"
    )
    pixels = CLIPImageProcessorPil.from_pretrained(folder)(
        images=inputs.images(), return_tensors="pt"
    )["pixel_values"]
    image = model.get_image_features(pixel_values=pixels)
    text = model.get_text_features(
        input_ids=made["input_ids"], attention_mask=made["attention_mask"]
    )
    unit = torch.nn.functional.normalize
    scale = getattr(model, "logit_scale", None)
    return {
        "version": np.array(transformers.__version__),
        "ids": made["input_ids"].numpy(),
        "pixels": pixels.numpy(),
        "image": unit(getattr(image, "pooler_output", image), dim=-1).numpy(),
        "text": unit(getattr(text, "pooler_output", text), dim=-1).numpy(),
        "scale": (1 / model.temperature if scale is None else scale.exp()).numpy(),
    }


def largest(one: Any, other: Any) -> float:
    """The largest absolute difference."""
    return float(np.abs(np.asarray(one, np.float64) - np.asarray(other)).max())


def differences(model: Model, theirs: dict[str, np.ndarray]) -> dict[str, float]:
    """How far m1clip is from the library."""
    preprocess, eot = model.preprocess, model.tokenizer.eot_id
    squares = [
        to_square(image, preprocess.image_size, preprocess.resize) for image in inputs.images()
    ]
    ids = model.tokenizer.tokenize(inputs.TEXTS, model.context_length)
    mismatches = 0
    for ours, row in zip(ids.tolist(), theirs["ids"].tolist(), strict=True):
        end = ours.index(eot) + 1
        mismatches += ours[:end] != row[:end]
    return {
        "ids": float(mismatches),
        "pixels": largest(
            render(torch.from_numpy(np.stack(squares)), None, preprocess), theirs["pixels"]
        ),
        "image": largest(model.encode_image(inputs.images()), theirs["image"]),
        "text": largest(model.encode_text(inputs.TEXTS), theirs["text"]),
        "scale": largest(model.clip.logit_scale.detach().exp(), theirs["scale"]),
    }


@torch.inference_mode()
def made(kind: str, name: str, folder: Path) -> dict[str, np.ndarray]:
    """The folder of the library, and its outputs."""
    if kind == "openclip":
        return write_openclip(name, folder)
    return write_transformers(name, folder)


def rows(kind: str, name: str, work: Path) -> list[dict[str, Any]]:
    """The rows of a model: as loaded, as saved and loaded again, and as exported to ONNX."""
    theirs = made(kind, name, work / "theirs")
    model = m1clip.load(work / "theirs", precision="fp32")
    differences_of = {f"{kind} -> m1clip, by adapter": differences(model, theirs)}
    model.save(work / "ours")
    again = m1clip.load(work / "ours", precision="fp32")
    differences_of["saved by m1clip, by adapter"] = differences(again, theirs)
    convert(read_model(work / "ours"), "onnx", work / "onnx")
    graphs = m1clip.load(work / "onnx")
    exported = {"ids": 0.0, "pixels": 0.0, "scale": 0.0}
    for side, values in (("image", inputs.images()), ("text", inputs.TEXTS)):
        own_vectors = np.asarray(getattr(model, f"encode_{side}")(values))
        exported[side] = largest(own_vectors, getattr(graphs, f"encode_{side}")(values))
    differences_of["m1clip -> ONNX, by adapter"] = exported
    return [
        {"model": name, "version": str(theirs["version"]), "direction": direction, **row}
        for direction, row in differences_of.items()
    ]


def main() -> None:
    """Write the rows of all models, or of those named after the file."""
    every = [("openclip", name) for name in OPENCLIP_MODELS]
    every += [("hf", name) for name in TRANSFORMERS_MODELS]
    chosen = sys.argv[2:]
    result = []
    for kind, name in every:
        if not chosen or name in chosen:
            with tempfile.TemporaryDirectory() as folder:
                result += rows(kind, name, Path(folder))
            for row in result[-3:]:
                numbers = " ".join(
                    f"{row[key]:9.1e}" for key in ("pixels", "image", "text", "scale")
                )
                print(f"{name:32} {row['direction']:30} {row['ids']:3.0f} {numbers}", flush=True)
    Path(sys.argv[1]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
