"""The other side of the parity check: runs in a Python with open_clip or transformers, on folders and files.

python peer.py make openclip|hf CONFIG.json FOLDER    a model with the weights of inputs.py, in their own format
python peer.py encode openclip|hf FOLDER OUT.npz      encode the images and sentences with their code
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
import torchvision_ops  # noqa: E402, F401  first: open_clip and transformers import torchvision


def fill(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(
                torch.from_numpy(np.asarray(inputs.tensor(name, tuple(parameter.shape))))
            )


def make(kind: str, config: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True)
    if kind == "openclip":
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
        seen = {"mean": open_clip.OPENAI_DATASET_MEAN, "std": open_clip.OPENAI_DATASET_STD}
        (folder / "open_clip_config.json").write_text(
            json.dumps({"model_cfg": config, "preprocess_cfg": seen})
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


def encode(kind: str, folder: Path) -> dict[str, np.ndarray]:
    """Unit vectors, pixels, ids and scale."""
    run = encode_openclip if kind == "openclip" else encode_hf
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
        "version": open_clip.__version__,
    }


def encode_hf(folder: Path) -> dict[str, Any]:
    """By transformers' own API; where the folder has no tokenizer, OpenAI's own ids are used."""
    import transformers
    from transformers import CLIPModel, CLIPTokenizer
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    model = CLIPModel.from_pretrained(folder).eval()
    found: dict[str, Any] = {"version": transformers.__version__}
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
    return found | {
        "pixels": pixels,
        "ids": ids,
        "image": unit(image, dim=-1),
        "text": unit(text, dim=-1),
        "scale": model.logit_scale.exp(),
    }


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(sys.argv[2], json.loads(Path(sys.argv[3]).read_text()), Path(sys.argv[4]))
    else:
        np.savez(sys.argv[4], **encode(sys.argv[2], Path(sys.argv[3])))
