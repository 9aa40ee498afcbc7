"""Finds a tower by its name or config: weights, preprocessing and tokenizer."""

from typing import Any

from m1clip.data.images import Preprocess
from m1clip.errors import UserError
from m1clip.io import read_small
from m1clip.model.named import resolve
from m1clip.model.presets import (
    PretrainedImageConfig,
    PretrainedTextConfig,
    TextTowerConfig,
    VisionTowerConfig,
)
from m1clip.model.pretrained.efficientnet import LITE, LITE0, ConcatTower, EfficientNetLite
from m1clip.model.pretrained.libraries import (
    OpenClipImageTower,
    OpenClipTextTower,
    TransformersClipImageTower,
    TransformersClipTextTower,
)
from m1clip.model.pretrained.minilm import MINILM, BertTower
from m1clip.model.pretrained.packages import PACKAGES, package_weights, wordpieces
from m1clip.model.pretrained.transformers import (
    TransformersImageTower,
    TransformersTextTower,
    load_transformers,
    tower_file,
)
from m1clip.model.towers import TextTower, Tower, VisionTower
from m1clip.model.weights import Tensors, read_json
from m1clip.text.base import Tokenizer
from m1clip.text.tokenizers import MAX_TOKENIZER_BYTES, FastTokenizer, wordpiece_tokenizer


def build_image_tower(config: VisionTowerConfig | PretrainedImageConfig) -> Tower:
    """The image tower of a config, without particular weights."""
    if isinstance(config, VisionTowerConfig):
        return VisionTower(config)
    if config.kind in LITE:
        sizes = LITE[config.kind]
        return EfficientNetLite(sizes[0]) if len(sizes) == 1 else ConcatTower(*sizes)
    if config.kind == "open_clip":
        return OpenClipImageTower(config.settings)
    if config.kind == "transformers-clip":
        return TransformersClipImageTower(config.settings)
    return TransformersImageTower(config.settings)


def build_text_tower(config: TextTowerConfig | PretrainedTextConfig) -> Tower:
    """The text tower of a config, without particular weights."""
    if isinstance(config, TextTowerConfig):
        return TextTower(config)
    if config.kind == "minilm":
        return BertTower(config.vocab_size, config.pad_id, MINILM)
    if config.kind == "open_clip":
        ids = (config.eot_id or 0, config.fill_id)
        return OpenClipTextTower(config.settings, *ids, config.context_length)
    if config.kind == "transformers-clip":
        return TransformersClipTextTower(config.settings, config.eot_id or 0)
    return TransformersTextTower(config.settings, config.pad_id)


HALF_RANGE = (0.5, 0.5, 0.5)  # EfficientNet-Lite was trained on pixels between -1 and 1


def tower_image_size(tower: str) -> int:
    """The side of the images that an image tower was trained on, where we know it."""
    return max(size.image_size for size in LITE.get(tower, (LITE0,)))


def load_image_tower(
    name: str, image_size: int = 224
) -> tuple[PretrainedImageConfig, Tensors, Preprocess]:
    """The config, weights and preprocessing of an image tower: `LITE`, or a transformers model."""
    if name in PACKAGES:
        config = PretrainedImageConfig(
            kind=name,  # type: ignore[arg-type]
            name=name,
            image_size=image_size,
        )
        return config, package_weights(name), _preprocess({}, image_size)
    folder = resolve(name)
    settings, weights, _ = load_transformers(folder, "vision")
    file = tower_file(folder, "preprocessor_config.json")
    preprocess = _preprocess(read_json(file) if file else {}, image_size)
    config = PretrainedImageConfig(
        kind="transformers", name=name, settings=settings, image_size=preprocess.image_size
    )
    return config, weights, preprocess


def load_text_tower(
    name: str, context_length: int = 64
) -> tuple[PretrainedTextConfig, Tensors, Tokenizer]:
    """The config, weights and tokenizer of a text tower: minilm, or a model of transformers."""
    if name in PACKAGES:
        tokenizer = wordpiece_tokenizer(wordpieces())
        settings = ""
        weights = package_weights(name)
    else:
        folder = resolve(name)
        settings, weights, pad_id = load_transformers(folder, "text")
        file = tower_file(folder, "tokenizer.json")
        if file is None:
            raise UserError(
                f"{name}: has no tokenizer.json; save it with transformers' fast tokenizer first"
            )
        try:
            tokenizer = FastTokenizer(read_small(file, MAX_TOKENIZER_BYTES).decode("utf-8"), pad_id)
        except ValueError as error:
            raise UserError(f"{file}: {error}") from None
    config = PretrainedTextConfig(
        kind="minilm" if name in PACKAGES else "transformers",
        name=name,
        settings=settings,
        context_length=context_length,
        vocab_size=tokenizer.vocab_size,
        pad_id=tokenizer.pad_id,
    )
    return config, weights, tokenizer


def _preprocess(processor: dict[str, Any], image_size: int) -> Preprocess:
    """The pixels that a tower was trained on.

    Images are squashed: a caption describes their edges too.
    """
    size = processor.get("crop_size", processor.get("size"))
    size = next(iter(size.values()), None) if isinstance(size, dict) else size
    mean, std = (tuple(processor.get(key, HALF_RANGE)) for key in ("image_mean", "image_std"))
    return Preprocess(
        image_size=size if isinstance(size, int) else image_size,
        mean=mean,
        std=std,
        resize="squash",
    )
