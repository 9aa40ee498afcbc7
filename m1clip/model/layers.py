"""The pre-norm transformer that both towers are made of."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from m1clip.model.presets import Activation, AttentionKind, Init, TextTowerConfig, VisionTowerConfig


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, kind: AttentionKind) -> Tensor:
    """(n, heads, length, dim) x 3 -> the same shape; `causal` lets position i see only positions <= i."""
    if kind == "sdpa":
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return _bmm_attention(q, k, v, causal)


def attention_at(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
    """One query for each sequence: q (n, heads, 1, dim); `seen` (n, length) says which positions it may see."""
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(2, 3)  # (n, heads, 1, length)
    if seen is not None:
        scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
    return scores.softmax(dim=-1) @ v


def _bmm_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    n, heads, length, dim = q.shape
    # The scale goes onto q: it is smaller than the score matrix, and bf16 scores stay in range.
    q = (q * dim**-0.5).reshape(n * heads, length, dim)
    scores = q @ k.reshape(n * heads, length, dim).transpose(1, 2)  # (n * heads, length, length)
    if causal:
        scores = scores + _causal_mask(length, scores.device, scores.dtype)
    weights = scores.softmax(dim=-1)
    return (weights @ v.reshape(n * heads, length, dim)).view(n, heads, length, dim)


def _causal_mask(length: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.full((length, length), float("-inf"), device=device, dtype=dtype).triu(1)


@functools.cache
def _fused_product() -> Any:
    """oneDNN's product with a fused bias, or None where torch was built without it."""
    if not torch.backends.mkldnn.is_available():
        return None
    try:
        product = torch.ops.mkldnn._linear_pointwise
        x = torch.ones(2, 4, dtype=torch.bfloat16)
        product(x, x, x[:, 0].contiguous(), "none", [], "")
        product.binary(x, x[:, :2].contiguous(), x, x[:, 0].contiguous(), "add")
    except (AttributeError, RuntimeError):  # a private operation: it may go, or want another processor
        return None
    return product


def is_fused(x: Tensor) -> bool:
    """Whether this input takes the oneDNN way: bf16 autocast on a CPU, run eagerly."""
    return (
        x.device.type == "cpu"
        and x.dtype == torch.bfloat16
        and torch.is_autocast_enabled("cpu")
        and torch.get_autocast_dtype("cpu") == torch.bfloat16
        and not torch.compiler.is_compiling()
        and _fused_product() is not None
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, norm: nn.LayerNorm | None = None) -> Tensor:
    """F.linear of the input, or of its layer norm; the weights may be fp32, the input decides."""
    if is_fused(x):
        return _Linear.apply(x, weight, bias, None, *norm_parts(norm))
    return F.linear(x if norm is None else norm(x).to(x.dtype), weight, bias)


def linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """residual + F.linear(x, weight, bias)."""
    if is_fused(x) and residual.dtype == x.dtype:
        return _Linear.apply(x, weight, bias, residual, *norm_parts(None))
    return residual + F.linear(x, weight, bias)


def product(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
    """The oneDNN call for 2-D bf16 tensors."""
    if residual is None:
        return _fused_product()(x, weight, bias, "none", [], "")
    return _fused_product().binary(x, residual, weight, bias, "add")


def half(parameter: Tensor) -> Tensor:
    """The bf16 copy of a parameter."""
    return parameter.detach().to(torch.bfloat16)


def to_keep(weight: Tensor, narrow: Tensor) -> Tensor:
    """What the backward pass keeps of a matrix: itself if it stays anyway, else (a sum with LoRA) the small copy.

    To cast it again takes 0.3% of the products it is for; kept copies are half a model at the peak of the step.
    """
    owner = weight._base if weight._base is not None else weight
    return weight if owner.is_leaf else narrow


def norm_parts(norm: nn.LayerNorm | None) -> tuple[Tensor | None, Tensor | None, float]:
    """A layer norm as arguments of an autograd function."""
    return (None, None, 0.0) if norm is None else (norm.weight, norm.bias, norm.eps)


def normed(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, ...]:
    """(rows, width) -> the layer norm of each row, its mean and its deviation; `x` itself where there is no norm."""
    return (x,) if weight is None else torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)


def through_norm(
    grad: Tensor | None, x: Tensor, stats: Sequence[Tensor], weight: Tensor | None, bias: Tensor | None,
    wants: list[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of the norm's input, weight and bias for that of its output."""
    if weight is None or grad is None:
        return grad, None, None
    return torch.ops.aten.native_layer_norm_backward(grad, x, x.shape[-1:], *stats, weight, bias, wants)


class _Linear(torch.autograd.Function):
    """Input in bf16, parameters and their gradients as they are kept (fp32). A layer norm is computed again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, norm: Tensor | None,
        norm_bias: Tensor | None, eps: float,
    ) -> Tensor:  # fmt: skip
        flat, narrow = x.flatten(0, -2), half(weight)
        ctx.save_for_backward(flat, to_keep(weight, narrow), norm, norm_bias)
        ctx.kept, ctx.eps = weight.dtype, eps
        added = None if residual is None else residual.flatten(0, -2)
        y = normed(flat, norm, norm_bias, eps)[0]
        return product(y, narrow, None if bias is None else half(bias), added).view(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        flat, weight, norm, norm_bias = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, wants_residual, *wants_norm, _ = ctx.needs_input_grad
        g = grad.reshape(-1, grad.shape[-1])
        y, *stats = normed(flat, norm, norm_bias, ctx.eps)
        dweight, dbias = parameter_grads(g, y, ctx.kept, wants_weight, wants_bias)
        del y
        dy = g @ half(weight) if wants_x or any(wants_norm) else None
        dx, dnorm, dnorm_bias = through_norm(dy, flat, stats, norm, norm_bias, [wants_x, *wants_norm])
        dx = None if dx is None else dx.view(*grad.shape[:-1], flat.shape[1])
        return dx, dweight, dbias, grad if wants_residual else None, dnorm, dnorm_bias, None


def parameter_grads(
    grad: Tensor, x: Tensor, dtype: torch.dtype, weight: bool, bias: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of a layer's weight and bias for the output's gradient and the input, both 2-D."""
    return (grad.t() @ x).to(dtype) if weight else None, grad.sum(0).to(dtype) if bias else None


def computed_again(module: nn.Module, function: Callable[..., Tensor], x: Tensor, *rest: object) -> Tensor:
    """function(x, *rest), a method of the module, whose inside is computed again in the backward pass, not kept."""
    draws = bool(getattr(module, "dropout", 0.0))
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        moving = [p for p in module.parameters() if p.requires_grad]
        return cast("Tensor", _Again.apply(function, draws, rest, x, *moving))
    # The random state is kept only for dropout: to read it has no place in a step that is recorded for replay.
    return cast("Tensor", checkpoint(function, x, *rest, use_reentrant=False, preserve_rng_state=draws))


class _Again(torch.autograd.Function):
    """The function without a graph, and once more with one when its gradient is asked for."""

    @staticmethod
    def forward(
        ctx: Any, function: Callable[..., Tensor], draws: bool, rest: tuple[object, ...], x: Tensor, *moving: Tensor
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, *moving)
        ctx.function, ctx.rest, ctx.random = function, rest, torch.get_rng_state() if draws else None
        ctx.autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        with _autocast(ctx):
            return function(x, *rest)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *moving = ctx.saved_tensors
        x = x.detach().requires_grad_(ctx.needs_input_grad[3])
        wanted = [x, *moving] if x.requires_grad else moving
        now = torch.get_rng_state() if ctx.random is not None else None
        try:
            if ctx.random is not None:
                torch.set_rng_state(ctx.random)  # the same dropout
            with torch.enable_grad(), _autocast(ctx):
                y = ctx.function(x, *ctx.rest)
        finally:
            if now is not None:
                torch.set_rng_state(now)
        # torch.autograd.grad, which would load the compiler's symbols to look at the shape of a given gradient.
        found = torch.autograd.graph._engine_run_backward(
            (y,), (grad,), False, False, tuple(wanted), True, accumulate_grad=False
        )
        return None, None, None, *(() if x.requires_grad else (None,)), *found


def _autocast(ctx: Any) -> torch.autocast:
    """As it was; without its cache, in which a weight that was cast without a graph would be found again with one."""
    on, dtype = ctx.autocast
    return torch.autocast("cpu", dtype=dtype, enabled=on, cache_enabled=False)


class Mlp(nn.Module):
    """Two linear layers with a GELU, or OpenAI's sigmoid approximation of it, between them."""

    def __init__(self, width: int, hidden: int, activation: Activation) -> None:
        super().__init__()
        self.quick = activation == "quick_gelu"
        self.use_triton = False
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor, residual: Tensor | None = None, norm: nn.LayerNorm | None = None) -> Tensor:
        """(n, length, width) -> the same shape; of the `norm` of `x`, and added to `residual`, where given."""
        if is_fused(x) and not self.quick:
            parts = (self.up.weight, self.up.bias, self.down.weight, self.down.bias)
            return _GeluMlp.apply(x, *parts, residual, *norm_parts(norm))
        if self.use_triton and not self.quick:
            from m1clip.model import triton_ops

            if triton_ops.takes(x):
                y = x if norm is None else norm(x).to(x.dtype)
                y = triton_ops.gelu_mlp(y, self.up.weight, self.up.bias, self.down.weight, self.down.bias)
                return y if residual is None else residual + y
        x = linear(x, self.up.weight, self.up.bias, norm)
        if torch.is_grad_enabled() and x.device.type == "cpu":
            # The activation is the block's largest tensor and the cheapest to compute again (docs/speed.md).
            x = computed_again(self.down, self._down, x)
        else:
            x = self._down(x)
        return x if residual is None else residual + x

    def mean(self, x: Tensor) -> Tensor:
        """(n, length, width) -> (n, width): the mean over the sequence, taken before the second product."""
        x = self._active(linear(x, self.up.weight, self.up.bias)).mean(dim=1)
        return linear(x, self.down.weight, self.down.bias)

    def _down(self, x: Tensor) -> Tensor:
        return self.down(self._active(x))

    def _active(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x) if self.quick else F.gelu(x)


class _GeluMlp(torch.autograd.Function):
    """The whole MLP for bf16 on the CPU; GELU, its largest tensor, and the norm are computed again backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        up: Tensor,
        up_bias: Tensor,
        down: Tensor,
        down_bias: Tensor,
        residual: Tensor | None,
        norm: Tensor | None,
        norm_bias: Tensor | None,
        eps: float,
    ) -> Tensor:
        flat = x.flatten(0, -2)
        narrow_up, narrow_down = half(up), half(down)
        hidden = product(normed(flat, norm, norm_bias, eps)[0], narrow_up, half(up_bias))
        matrices = to_keep(up, narrow_up), to_keep(down, narrow_down)
        ctx.save_for_backward(flat, hidden, *matrices, norm, norm_bias)
        ctx.kept, ctx.eps = up.dtype, eps
        added = None if residual is None else residual.flatten(0, -2)
        return product(F.gelu(hidden), narrow_down, half(down_bias), added).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        flat, hidden, up, down, norm, norm_bias = ctx.saved_tensors
        wants_x, wants_up, wants_up_bias, wants_down, wants_down_bias, wants_residual, *wants_norm, _ = (
            ctx.needs_input_grad
        )
        g = grad.reshape(-1, grad.shape[-1])
        active = F.gelu(hidden) if wants_down else g
        ddown, ddown_bias = parameter_grads(g, active, ctx.kept, wants_down, wants_down_bias)
        del active
        dhidden = g @ half(down)
        torch.ops.aten.gelu_backward.grad_input(dhidden, hidden, grad_input=dhidden)
        y, *stats = normed(flat, norm, norm_bias, ctx.eps)
        dup, dup_bias = parameter_grads(dhidden, y, ctx.kept, wants_up, wants_up_bias)
        del y
        dy = dhidden @ half(up) if wants_x or any(wants_norm) else None
        dx, dnorm, dnorm_bias = through_norm(dy, flat, stats, norm, norm_bias, [wants_x, *wants_norm])
        dx = None if dx is None else dx.view(grad.shape)
        dresidual = grad if wants_residual else None
        return dx, dup, dup_bias, ddown, ddown_bias, dresidual, dnorm, dnorm_bias, None


Place = Tensor | int  # (n,) a position for each sequence, or one for all


def pick(x: Tensor, place: Place) -> Tensor:
    """(n, length, width) -> (n, width): one position of each sequence."""
    return x[:, place] if isinstance(place, int) else x[torch.arange(len(x), device=x.device), place]


def _run(block: nn.Module, function: Callable[..., Tensor], *inputs: object) -> Tensor:
    return function(*inputs)


class Attention(nn.Module):
    """Multi-head self-attention with one fused matrix for queries, keys and values."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.kind: AttentionKind = "sdpa"
        self.use_triton = False
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, residual: Tensor | None = None, norm: nn.LayerNorm | None = None) -> Tensor:
        """(n, length, width) -> the same shape; of the `norm` of `x`, and added to `residual`, where given."""
        mixed = self._mixed(x, norm)
        if residual is None:
            return linear(mixed, self.out.weight, self.out.bias)
        return linear_add(mixed, self.out.weight, self.out.bias, residual)

    def _mixed(self, x: Tensor, norm: nn.LayerNorm | None) -> Tensor:
        """What the heads see, side by side: (n, length, width)."""
        n, length, width = x.shape
        if self.use_triton and self.kind == "sdpa":  # who asks for bmm gets it
            from m1clip.model import triton_ops

            if triton_ops.takes_attention(x, self.heads):
                y = x if norm is None else norm(x).to(x.dtype)
                return triton_ops.short_attention(y, self.qkv.weight, self.qkv.bias, self.heads, self.causal)
        qkv = linear(x, self.qkv.weight, self.qkv.bias, norm).view(n, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (n, heads, length, dim)
        return attention(q, k, v, self.causal, self.kind).transpose(1, 2).reshape(n, length, width)

    def at(self, x: Tensor, place: Place) -> Tensor:
        """What `forward` gives at one place of each sequence, (n, width): its query alone, all keys and values."""
        n, length, width = x.shape
        weight, bias, heads = self.qkv.weight, self.qkv.bias, self.heads
        q = linear(pick(x, place), weight[:width], bias[:width]).view(n, heads, 1, width // heads)
        kv = linear(x, weight[width:], bias[width:]).view(n, length, 2, heads, width // heads)
        k, v = kv.permute(2, 0, 3, 1, 4).unbind(0)  # each (n, heads, length, dim)
        positions = torch.arange(length, device=x.device)
        seen = positions <= torch.as_tensor(place, device=x.device).view(-1, 1) if self.causal else None
        mixed = attention_at(q, k, v, seen if seen is None else seen.expand(n, -1)).reshape(n, width)
        return linear(mixed, self.out.weight, self.out.bias)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int, hidden: int, causal: bool, activation: Activation, dropout: float):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads, causal)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = Mlp(width, hidden, activation)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        """(n, length, width) -> the same shape and dtype."""
        x = self._mixed(x)
        if self.dropout and self.training:
            return x + self._drop(self.mlp(x, norm=self.norm2))
        return self.mlp(x, residual=x, norm=self.norm2)

    def at(self, x: Tensor, place: Place) -> Tensor:
        """What `forward` gives at one place of each sequence, (n, width), with the work of that place alone."""
        y = pick(x, place) + self._drop(self.attn.at(self.norm1(x).to(x.dtype), place))
        return y + self._drop(self.mlp(self.norm2(y).to(y.dtype)))

    def mean(self, x: Tensor) -> Tensor:
        """The mean over the sequence of what `forward` gives, (n, width): the last product is done after the mean."""
        x = self._mixed(x)
        return x.mean(dim=1) + self._drop(self.mlp.mean(self.norm2(x).to(x.dtype)))

    def _mixed(self, x: Tensor) -> Tensor:
        if self.dropout and self.training:
            return x + self._drop(self.attn(x, norm=self.norm1))
        # Norm and sum are part of the products where that is faster or takes less memory.
        return self.attn(x, residual=x, norm=self.norm1)

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class Transformer(nn.Module):
    """A stack of blocks, with activation checkpointing as a switch."""

    def __init__(self, config: VisionTowerConfig | TextTowerConfig, causal: bool) -> None:
        super().__init__()
        self.width = config.width
        self.activation_checkpointing = False
        hidden = int(config.width * config.mlp_ratio)
        self.blocks = nn.ModuleList(
            Block(config.width, config.heads, hidden, causal, config.activation, config.dropout)
            for _ in range(config.layers)
        )

    def forward(self, x: Tensor, place: Place | Literal["mean"] | None = None) -> Tensor:
        """(n, length, width) -> the same shape; (n, width) where only one place, or the mean, will be read.

        The last block then does the work of what is read: the same numbers for a twelfth less of ViT-B's work.
        """
        *first, last = self._each()
        run = computed_again if self.activation_checkpointing and torch.is_grad_enabled() else _run
        for block in first:
            x = run(block, block, x)
        if place is None:
            return run(last, last, x)
        return run(last, last.mean, x) if isinstance(place, str) else run(last, last.at, x, place)

    def _each(self) -> Iterator[Block]:
        return iter(cast("Iterable[Block]", self.blocks))

    def set_attention(self, kind: AttentionKind) -> None:
        """Use one implementation of attention in every block."""
        for block in self._each():
            block.attn.kind = kind

    def use_triton(self, on: bool) -> None:
        """Use the kernels of triton_ops.py where the input allows it: bf16 on CUDA."""
        for block in self._each():
            block.attn.use_triton = block.mlp.use_triton = on

    @torch.no_grad()
    def initialize(self, init: Init) -> None:
        """CLIP's scaled normal start, or the same with silent residual branches ("zero")."""
        branch = self.width**-0.5 * (2 * len(self.blocks)) ** -0.5
        for block in self._each():
            nn.init.normal_(block.attn.qkv.weight, std=self.width**-0.5)
            nn.init.normal_(block.mlp.up.weight, std=(2 * self.width) ** -0.5)
            for last in (block.attn.out, block.mlp.down):
                nn.init.normal_(last.weight, std=branch)
                if init == "zero":
                    nn.init.zeros_(last.weight)
            for layer in (block.attn.qkv, block.attn.out, block.mlp.up, block.mlp.down):
                nn.init.zeros_(layer.bias)
