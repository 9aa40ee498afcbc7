"""EfficientNet-Lite image towers: convolutions, blocks, and the conversion of their weights."""

import functools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from m1clip.model.layers import prepack
from m1clip.model.towers import Tower
from m1clip.model.weights import Tensors


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
    shapes = zip(
        repeats,
        (3, 3, 5, 3, 5, 5, 3),
        (1, 2, 2, 2, 1, 2, 1),
        (1, 6, 6, 6, 6, 6, 6),
        widths,
        strict=True,
    )
    return LiteSize(tuple(Stage(*shape) for shape in shapes), image_size)


STEM_CHANNELS = 32
HEAD_CHANNELS = 1280
LITE0 = _lite((1, 2, 2, 3, 3, 4, 1), (16, 24, 40, 80, 112, 192, 320), 224)
LITE2 = _lite((1, 3, 3, 4, 4, 5, 1), (16, 24, 48, 88, 120, 208, 352), 260)
# Image tower -> the networks in it.
LITE = {
    "efficientnet-lite0": (LITE0,),
    "efficientnet-lite2": (LITE2,),
    "efficientnet-lite0+lite2": (LITE0, LITE2),
}
BATCH_NORM_EPS = 1e-3
POOLED_STAGES = (2, 3, 4, 5, 6)  # in addition to the last layer, which loses colors and textures


@functools.cache
def onednn_conv(dtype: torch.dtype) -> Any:
    """oneDNN's convolution with a fused activation or sum.

    None if this torch or processor has none for the dtype.
    """
    try:
        op = torch.ops.mkldnn._convolution_pointwise
        x = torch.ones(1, 4, 2, 2, dtype=dtype)
        kernel = torch.ones(4, 4, 1, 1, dtype=dtype)
        options = ([0, 0], [1, 1], [1, 1], 1)
        torch.ops.mkldnn._reorder_convolution_weight(kernel, *options, [1, 4, 2, 2])
        op(x, kernel, x[0, :, 0, 0], *options, "hardtanh", [0.0, 6.0], "")
        op.binary(x, x, kernel, x[0, :, 0, 0], *options, "add", 1.0, None, [], None)
    except (AttributeError, RuntimeError):  # private operations, as in layers.py
        return None
    return op


class _Depthwise(torch.autograd.Function):
    """A depthwise convolution in bf16 on the CPU.

    OneDNN computes the gradient of its weight faster in fp32.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, stride: list[int], padding: list[int]
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.options = (stride, padding, [1, 1], False, [0, 0], len(weight))
        return F.conv2d(
            x, weight.to(x.dtype), bias.to(x.dtype), stride, padding, groups=len(weight)
        )

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        sizes = [len(weight)]
        backward = torch.ops.aten.convolution_backward
        needs_x, *needs = ctx.needs_input_grad[:3]
        dx = backward(grad, x, weight.to(x.dtype), sizes, *ctx.options, [needs_x, False, False])[0]
        _, dweight, dbias = backward(
            grad.float(), x.float(), weight, sizes, *ctx.options, [False, *needs]
        )
        return dx, dweight, dbias, None, None


class SameConv(nn.Conv2d):
    """A convolution padded as in TensorFlow: odd padding goes to the right and bottom."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1
    ) -> None:
        # With stride 1 the padding is even, and the convolution can do it itself.
        self.uneven = stride > 1
        super().__init__(
            inputs, outputs, kernel, stride, 0 if self.uneven else kernel // 2, groups=groups
        )

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
            return cast(
                "Tensor", _Depthwise.apply(x, self.weight, self.bias, self.stride, self.padding)
            )
        return super().forward(x)

    def onednn_arguments(self, sides: list[int], dtype: torch.dtype) -> tuple[Any, ...]:
        """Weight, bias and options of oneDNN's convolution for images of these sides."""
        total = [self._padding(length) for length in sides]
        # Odd padding as a kernel with one more row of zeros: copying the image into a larger one
        # takes longer.
        down, across = (length % 2 for length in total)
        options = ([-(-length // 2) for length in total], [*self.stride], [1, 1], self.groups)
        kernel = F.pad(self.weight, (across, 0, down, 0)).to(
            dtype, memory_format=torch.channels_last
        )
        shape = [1, self.in_channels, *sides]
        # In the order it is read.
        weight = torch.ops.mkldnn._reorder_convolution_weight(kernel, *options, shape)
        assert self.bias is not None
        return weight, self.bias.to(dtype), *options

    def _padding(self, length: int) -> int:
        kernel = self.kernel_size[0]
        stride = self.stride[0]
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
    """Images to features: the mean over the image of the last layer and of some stages."""

    def __init__(self, size: LiteSize = LITE0) -> None:
        super().__init__()
        self.width = HEAD_CHANNELS + sum(size.stages[stage].width for stage in POOLED_STAGES)
        self.stem = SameConv(3, STEM_CHANNELS, 3, 2)
        self.stages = nn.ModuleList()
        width = STEM_CHANNELS
        for stage in size.stages:
            blocks = nn.Sequential()
            for number in range(stage.repeats):
                blocks.append(InvertedResidual(width, stage, stage.stride if number == 0 else 1))
                width = stage.width
            self.stages.append(blocks)
        self.head = SameConv(width, HEAD_CHANNELS, 1)
        self.convs = [module for module in self.modules() if isinstance(module, SameConv)]

    def forward(self, pixels: Tensor) -> Tensor:
        """(n, 3, h, w) normalized pixels -> (n, width)."""
        on_cpu = pixels.device.type == "cpu" and torch.is_inference_mode_enabled()
        # oneDNN of torch 2.11 does not add maps of 1 x 1, the last ones of an image of 32 pixels.
        if on_cpu and min(pixels.shape[2:]) > 32:
            dtype = (
                torch.get_autocast_dtype("cpu")
                if torch.is_autocast_enabled("cpu")
                else pixels.dtype
            )
            if (op := onednn_conv(dtype)) is not None:
                return self._forward_fused(pixels.to(dtype, memory_format=torch.channels_last), op)
        x = F.relu6(self.stem(pixels.contiguous(memory_format=torch.channels_last)))
        pooled = []
        for number, stage in enumerate(self.stages):
            x = stage(x)
            if number in POOLED_STAGES:
                pooled.append(x.mean(dim=(2, 3)))
        pooled.append(F.relu6(self.head(x)).mean(dim=(2, 3)))
        return torch.cat(pooled, dim=1)

    def _forward_fused(self, x: Tensor, op: Any) -> Tensor:
        """The same with activations and sums in oneDNN's convolutions, 2.5 times as fast.

        Arguments are built once.
        """
        dtype = x.dtype
        pooled = []
        sides = [*x.shape[2:]]
        weights = (p for conv in self.convs for p in conv._parameters.values())
        state = [(p.data_ptr(), p.is_inference() or p._version) for p in weights if p is not None]
        blocks = prepack(
            self.stem.weight, lambda _: [*self._onednn_blocks(sides, dtype)], dtype, sides, state
        )
        for leading, last, residual, pool in blocks:
            y = x
            for arguments in leading:
                y = op(y, *arguments)
            x = op.binary(y, x, *last) if residual else op(y, *last)
            if pool:
                pooled.append(x.mean(dim=(2, 3)))
        return torch.cat(pooled, dim=1)

    def _onednn_blocks(
        self, sides: list[int], dtype: torch.dtype
    ) -> Iterator[tuple[list[Any], Any, bool, bool]]:
        """Yield the arguments of oneDNN's convolutions for each block.

        (arguments of its first convolutions, of its last, whether it has a residual, whether to
        pool its output)
        """

        def arguments(conv: SameConv, *ending: Any) -> tuple[Any, ...]:
            nonlocal sides
            fixed = conv.onednn_arguments(sides, dtype)
            sides = [-(-side // conv.stride[0]) for side in sides]
            return *fixed, *(ending or ("hardtanh", [0.0, 6.0], ""))  # relu6

        yield [], arguments(self.stem), False, False
        for number, stage in enumerate(cast("Iterable[nn.Sequential]", self.stages)):
            for position, block in enumerate(cast("Iterable[InvertedResidual]", stage), start=1):
                convs = (
                    conv for conv in (block.expand, block.depthwise) if isinstance(conv, SameConv)
                )
                leading = [arguments(conv) for conv in convs]
                has_residual = block.residual
                last = arguments(
                    block.project,
                    *(("add", 1.0, None, [], None) if has_residual else ("none", [], "")),
                )
                yield (
                    leading,
                    last,
                    has_residual,
                    position == len(stage) and number in POOLED_STAGES,
                )
        yield [], arguments(self.head), False, True


def from_efficientnet(weights: Tensors, size: LiteSize = LITE0) -> Tensors:
    """The package's tensors under our names, with batch norms folded into the convolutions."""
    # (convolution, its norm) -> ours.
    names = {("_conv_stem", "_bn0"): "stem", ("_conv_head", "_bn1"): "head"}
    blocks = ((s, repeat) for s, stage in enumerate(size.stages) for repeat in range(stage.repeats))
    for number, (stage, repeat) in enumerate(blocks):
        theirs = f"_blocks.{number}"
        block = f"stages.{stage}.{repeat}"
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
