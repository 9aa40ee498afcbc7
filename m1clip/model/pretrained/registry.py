"""Finds a tower by its name or config: weights, preprocessing and tokenizer."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from m1clip.data.images import Preprocess
from m1clip.errors import UserError
from m1clip.io import read_small
from m1clip.model.catalog import TOWER_CATALOG
from m1clip.model.named import resolve
from m1clip.model.presets import (
    PretrainedImageConfig,
    PretrainedTextConfig,
    TextTowerConfig,
    VisionTowerConfig,
)
from m1clip.model.pretrained.bert import MINILM, BertSize, BertTower
from m1clip.model.pretrained.concat import ConcatImageTower, ConcatTower
from m1clip.model.pretrained.dinov2 import DinoSize, DinoTower
from m1clip.model.pretrained.efficientnet import LITE, LITE0, EfficientNetLite
from m1clip.model.pretrained.folders import (
    native_size,
    read_bert,
    read_dinov2,
    settings_of,
    size_from,
    trained_image_size,
)
from m1clip.model.pretrained.libraries import (
    OpenClipImageTower,
    OpenClipTextTower,
    TransformersClipImageTower,
    TransformersClipTextTower,
)
from m1clip.model.pretrained.packages import (
    PACKAGES,
    package_weights,
    side_by_side,
    tower_parts,
    wordpieces,
)
from m1clip.model.pretrained.transformers import (
    TransformersImageTower,
    TransformersTextTower,
    load_transformers,
    tower_file,
)
from m1clip.model.towers import TextTower, Tower, VisionTower
from m1clip.model.weights import Tensors, read_json
from m1clip.text.base import Tokenizer
from m1clip.text.tokenizers import (
    MAX_TOKENIZER_BYTES,
    FastTokenizer,
    same_tokens,
    wordpiece_tokenizer,
)

HALF_RANGE = (0.5, 0.5, 0.5)  # EfficientNet-Lite was trained on pixels between -1 and 1
NATIVE_PIXELS = (HALF_RANGE, HALF_RANGE)  # mean and deviation of what our own code takes
LoadedImage = tuple[PretrainedImageConfig, Tensors, Preprocess]
LoadedText = tuple[PretrainedTextConfig, Tensors, Tokenizer]


def build_image_tower(config: VisionTowerConfig | PretrainedImageConfig) -> Tower:
    """The image tower of a config, without particular weights."""
    if isinstance(config, VisionTowerConfig):
        return VisionTower(config)
    if config.kind == "concat":
        parts = [build_image_tower(part) for part in config.parts]
        return ConcatImageTower(parts, [part.image_size for part in config.parts])
    if config.kind == "dinov2":
        return DinoTower(size_from(DinoSize, config.settings, config.name), config.image_size)
    if config.kind in LITE:
        sizes = LITE[config.kind]
        towers = [EfficientNetLite(size) for size in sizes]
        if len(towers) == 1:
            return towers[0]
        return ConcatImageTower(towers, [size.image_size for size in sizes])
    if config.kind == "open_clip":
        return OpenClipImageTower(config.settings)
    if config.kind == "transformers-clip":
        return TransformersClipImageTower(config.settings)
    return TransformersImageTower(config.settings)


def build_text_tower(config: TextTowerConfig | PretrainedTextConfig) -> Tower:
    """The text tower of a config, without particular weights."""
    if isinstance(config, TextTowerConfig):
        return TextTower(config)
    if config.kind == "concat":
        return ConcatTower([build_text_tower(part) for part in config.parts])
    if config.kind in ("minilm", "bert"):
        size = MINILM
        if config.kind == "bert":
            size = size_from(BertSize, config.settings, config.name)
        if config.context_length > size.positions:
            raise UserError(
                f"{config.name} reads at most {size.positions} tokens, not {config.context_length}"
            )
        return BertTower(config.vocab_size, config.pad_id, size)
    if config.kind == "open_clip":
        ids = (config.eot_id or 0, config.fill_id)
        return OpenClipTextTower(config.settings, *ids, config.context_length)
    if config.kind == "transformers-clip":
        return TransformersClipTextTower(config.settings, config.eot_id or 0)
    return TransformersTextTower(config.settings, config.pad_id)


def tower_image_size(name: str) -> int:
    """The side of the images that an image tower was trained on, where we know it."""
    return max(_part_image_size(part) for part in tower_parts(name))


def _part_image_size(part: str) -> int:
    if part in LITE:
        return max(size.image_size for size in LITE[part])
    if part in TOWER_CATALOG:
        return TOWER_CATALOG[part].image_size
    folder = Path(part)
    is_native = folder.is_dir() and isinstance(native_size(folder), DinoSize)
    return trained_image_size(folder) if is_native else LITE0.image_size


def load_image_tower(name: str, image_size: int = 224) -> LoadedImage:
    """The config, weights and preprocessing of an image tower, or of several side by side."""
    parts = tower_parts(name)
    if len(parts) == 1:
        return _load_image_part(name, image_size)
    largest = tower_image_size(name)
    loaded = []
    for part in parts:
        side = round(image_size * _part_image_size(part) / largest)
        if part not in PACKAGES:
            side = _nearest_size(part, side)
        config, weights, _ = _load_image_part(part, side)
        if config.kind == "transformers":
            raise _not_native(part)
        loaded.append((config, weights))
    configs = tuple(config for config, _ in loaded)
    together = PretrainedImageConfig(
        kind="concat",
        name=name,
        image_size=max(config.image_size for config in configs),
        parts=configs,
    )
    weights = side_by_side([part for _, part in loaded])
    return together, weights, _preprocess({}, together.image_size)


def _nearest_size(part: str, side: int) -> int:
    """The image size nearest to `side` that a tower of a folder takes."""
    size = native_size(resolve(part))
    if not isinstance(size, DinoSize):
        return side
    return max(1, round(side / size.patch_size)) * size.patch_size


def _not_native(part: str) -> UserError:
    kinds = "EfficientNet-Lite and DINOv2, or MiniLM and BERT"
    return UserError(f"{part}: only these can be side by side with other towers: {kinds}")


def _load_image_part(name: str, image_size: int) -> LoadedImage:
    if name in PACKAGES:
        config = PretrainedImageConfig(
            kind=name,  # type: ignore[arg-type]
            name=name,
            image_size=image_size,
        )
        return config, package_weights(name), _preprocess({}, image_size)
    folder = resolve(name)
    size = native_size(folder)
    if isinstance(size, DinoSize):
        weights = read_dinov2(folder, size, image_size, NATIVE_PIXELS)
        config = PretrainedImageConfig(
            kind="dinov2", name=name, settings=settings_of(size), image_size=image_size
        )
        return config, weights, _preprocess({}, image_size)
    settings, weights, _ = load_transformers(folder, "vision")
    file = tower_file(folder, "preprocessor_config.json")
    preprocess = _preprocess(read_json(file) if file else {}, image_size)
    config = PretrainedImageConfig(
        kind="transformers", name=name, settings=settings, image_size=preprocess.image_size
    )
    return config, weights, preprocess


def load_text_tower(name: str, context_length: int = 64) -> LoadedText:
    """The config, weights and tokenizer of a text tower, or of several side by side."""
    parts = tower_parts(name)
    if len(parts) == 1:
        return _load_text_part(name, context_length)
    loaded = [_load_text_part(part, context_length) for part in parts]
    first, _, tokenizer = loaded[0]
    for config, _, other in loaded:
        if config.kind == "transformers":
            raise _not_native(config.name)
        if not same_tokens(tokenizer, other):
            raise UserError(
                f"{name}: {config.name} has other tokens than {first.name}, so they cannot be side"
                " by side"
            )
    together = replace(
        first, kind="concat", name=name, settings="", parts=tuple(config for config, _, _ in loaded)
    )
    return together, side_by_side([weights for _, weights, _ in loaded]), tokenizer


def _load_text_part(name: str, context_length: int) -> LoadedText:
    settings = ""
    kind: Any = "minilm"
    if name in PACKAGES:
        tokenizer: Tokenizer = wordpiece_tokenizer(wordpieces())
        weights = package_weights(name)
        vocab_size = tokenizer.vocab_size
    else:
        folder = resolve(name)
        size = native_size(folder)
        if isinstance(size, BertSize):
            kind = "bert"
            settings = settings_of(size)
            weights, vocab_size = read_bert(folder, size)
            tokenizer = _read_tokenizer(folder, name, 0)
        else:
            kind = "transformers"
            settings, weights, pad_id = load_transformers(folder, "text")
            tokenizer = _read_tokenizer(folder, name, pad_id)
            vocab_size = tokenizer.vocab_size
    config = PretrainedTextConfig(
        kind=kind,
        name=name,
        settings=settings,
        context_length=context_length,
        vocab_size=vocab_size,
        pad_id=tokenizer.pad_id,
    )
    return config, weights, tokenizer


def _read_tokenizer(folder: Path, name: str, pad_id: int) -> FastTokenizer:
    file = tower_file(folder, "tokenizer.json")
    if file is None:
        raise UserError(
            f"{name}: has no tokenizer.json; save it with transformers' fast tokenizer first"
        )
    try:
        return FastTokenizer(read_small(file, MAX_TOKENIZER_BYTES).decode("utf-8"), pad_id)
    except ValueError as error:
        raise UserError(f"{file}: {error}") from None


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
