"""The other side of the parity check: runs in a Python with open_clip or transformers, on folders and files.

python peer.py make KIND CONFIG.json FOLDER    a model with the weights of inputs.py, in their own
format python peer.py encode KIND FOLDER OUT.npz      encode the images and sentences with their
code

KIND is openclip or hf, and openclip-siglip or hf-siglip, whose folders have a tokenizer of their
own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "benchmarks" / "peers")]

import inputs  # noqa: E402
import tokenizer_files  # noqa: E402
import torchvision_ops  # noqa: E402, F401  first: open_clip and transformers import torchvision


def fill(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(
                torch.from_numpy(np.asarray(inputs.tensor(name, tuple(parameter.shape))))
            )


def make(kind: str, config: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True)
    if kind.endswith("-siglip"):
        make_siglip(kind, config, folder)
    elif kind == "openclip":
        import open_clip
        from safetensors.torch import save_file

        model = open_clip.CLIP(**config)
        fill(model)
        state = {name: value.contiguous() for name, value in model.state_dict().items()}
        torch.save(
            {"epoch": 1, "state_dict": {f"module.{name}": value for name, value in state.items()}},
            folder / "epoch_1.pt",
        )
        save_file(state, folder / "open_clip_model.safetensors")
        preprocess = {"mean": open_clip.OPENAI_DATASET_MEAN, "std": open_clip.OPENAI_DATASET_STD}
        (folder / "open_clip_config.json").write_text(
            json.dumps({"model_cfg": config, "preprocess_cfg": preprocess})
        )
    else:
        from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel

        hf = CLIPModel(CLIPConfig(**config)).eval()
        fill(hf)
        hf.save_pretrained(folder)
        size = config["vision_config"]["image_size"]
        CLIPImageProcessor(
            size={"shortest_edge": size}, crop_size={"height": size, "width": size}
        ).save_pretrained(folder)


SQUASHED = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5), "resize_mode": "squash"}


def make_siglip(kind: str, config: dict[str, Any], folder: Path) -> None:
    """A SigLIP with a tokenizer.

    A large vocabulary means SigLIP 2's, with images that are resized bilinearly.
    """
    gemma = config.pop("tokenizer") == "gemma"
    model: torch.nn.Module
    if kind == "openclip-siglip":
        import open_clip
        from safetensors.torch import save_file

        model = open_clip.CustomTextCLIP(
            **{key: value for key, value in config.items() if key != "custom_text"}
        )
        fill(model)
        save_file(dict(model.state_dict()), folder / "open_clip_model.safetensors")
        preprocess = {**SQUASHED, "interpolation": "bilinear" if gemma else "bicubic"}
        (folder / "open_clip_config.json").write_text(
            json.dumps({"model_cfg": config, "preprocess_cfg": preprocess})
        )
    else:
        from transformers import SiglipConfig, SiglipImageProcessor, SiglipModel

        model = SiglipModel(SiglipConfig(**config)).eval()
        fill(model)
        model.save_pretrained(folder)
        side = config["vision_config"]["image_size"]
        SiglipImageProcessor(
            size={"height": side, "width": side}, resample=2 if gemma else 3
        ).save_pretrained(folder)
    if gemma:
        tokenizer_files.write_gemma(folder)
    else:
        from transformers import SiglipTokenizer

        tokenizer_files.write_sentencepiece(folder)
        if kind == "hf-siglip":
            SiglipTokenizer(str(folder / "spiece.model")).save_pretrained(folder)
        else:
            # open_clip's repositories have the fast tokenizer of T5, without the cleaning.
            write_t5(folder)


def write_t5(folder: Path) -> None:
    """The fast tokenizer of T5 for a spiece.model, as in open_clip's repositories."""
    from transformers import T5Tokenizer

    T5Tokenizer.from_pretrained(folder, extra_ids=0, pad_token="</s>").save_pretrained(folder)
    (folder / "spiece.model").unlink()


def encode(kind: str, folder: Path) -> dict[str, np.ndarray]:
    """Unit vectors, pixels, ids and scale."""
    run = {
        "openclip": encode_openclip,
        "openclip-siglip": encode_openclip,
        "hf": encode_hf,
        "hf-siglip": encode_hf_siglip,
    }[kind]
    with torch.inference_mode():
        return {name: np.asarray(value) for name, value in run(folder).items()}


def encode_openclip(folder: Path) -> dict[str, Any]:
    import open_clip

    model, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    model.eval()
    tokens = open_clip.get_tokenizer(f"local-dir:{folder}")(inputs.TEXTS)
    pixels = torch.stack([preprocess(image) for image in inputs.images()])
    return {
        "pixels": pixels,
        "ids": tokens,
        "image": model.encode_image(pixels, normalize=True),
        "text": model.encode_text(tokens, normalize=True),
        "scale": model.logit_scale.exp(),
        **({} if model.logit_bias is None else {"bias": model.logit_bias}),
        "version": open_clip.__version__,
    }


def encode_hf(folder: Path) -> dict[str, Any]:
    """By transformers' own API; where the folder has no tokenizer, OpenAI's own ids are used."""
    import transformers
    from transformers import CLIPModel, CLIPTokenizer
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    model = CLIPModel.from_pretrained(folder).eval()
    answer: dict[str, Any] = {"version": transformers.__version__}
    if (folder / "vocab.json").exists():
        length = model.config.text_config.max_position_embeddings
        made = CLIPTokenizer.from_pretrained(folder)(
            inputs.TEXTS,
            padding="max_length",
            truncation=True,
            max_length=length,
            return_tensors="pt",
        )
        ids = made["input_ids"]
    else:
        ids = torch.from_numpy(np.load(folder / "ids.npy"))
    pixels = CLIPImageProcessorPil.from_pretrained(folder)(
        images=inputs.images(), return_tensors="pt"
    )["pixel_values"]
    image = model.visual_projection(model.vision_model(pixels).pooler_output)
    text = model.text_projection(model.text_model(ids).pooler_output)
    unit = torch.nn.functional.normalize
    return answer | {
        "pixels": pixels,
        "ids": ids,
        "image": unit(image, dim=-1),
        "text": unit(text, dim=-1),
        "scale": model.logit_scale.exp(),
    }


def encode_hf_siglip(folder: Path) -> dict[str, Any]:
    """By transformers' own API, padded to the context length as its documentation says."""
    import transformers
    from transformers import AutoTokenizer, SiglipModel
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    model = SiglipModel.from_pretrained(folder).eval()
    length = model.config.text_config.max_position_embeddings
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.padding_side = "right"
    ids = tokenizer(
        inputs.TEXTS, padding="max_length", truncation=True, max_length=length, return_tensors="pt"
    )["input_ids"]
    pixels = SiglipImageProcessorPil.from_pretrained(folder)(
        images=inputs.images(), return_tensors="pt"
    )["pixel_values"]
    output = model(input_ids=ids, pixel_values=pixels)
    return {
        "pixels": pixels,
        "ids": ids,
        "image": output.image_embeds,
        "text": output.text_embeds,
        "scale": model.logit_scale.exp()[0],
        "bias": model.logit_bias[0],
        "version": transformers.__version__,
    }


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(sys.argv[2], json.loads(Path(sys.argv[3]).read_text()), Path(sys.argv[4]))
    else:
        np.savez(sys.argv[4], **encode(sys.argv[2], Path(sys.argv[3])))
