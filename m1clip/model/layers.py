"""The pre-norm transformer that both towers are made of."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakTensorKeyDictionary

from m1clip.hardware.device import causal_sdpa_is_wrong
from m1clip.hardware.machine_info import read_machine_info
from m1clip.model.backward import gradients_from
from m1clip.model.presets import Activation, AttentionKind, Init, TextTowerConfig, VisionTowerConfig

MAX_POSITIONS = 256  # for inference by two matmuls: their memory grows with the square


def infers() -> bool:
    """Whether inference mode is on, which code that is compiled cannot ask."""
    return not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, kind: AttentionKind = "auto"
) -> Tensor:
    """(n, heads, length, dim) x 3 -> the same shape.

    `causal` lets position i see only positions <= i.
    """
    if kind == "auto":
        # Two bf16 matmuls on a CPU take less time than SDPA: 14% in training, a third in inference
        # (without a mask).
        uses_matmuls = q.dtype == torch.bfloat16 and q.device.type == "cpu"
        uses_matmuls = uses_matmuls and (
            not infers() or (not causal and q.shape[2] <= MAX_POSITIONS)
        )
        kind = "bmm" if uses_matmuls else "sdpa"
    if kind == "sdpa" and not (causal and causal_sdpa_is_wrong(q.device.type, q.dtype)):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return _bmm_attention(q, k, v, causal)


def _bmm_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    n, heads, length, dim = q.shape
    # The scale goes onto q: it is smaller than the score matrix, and bf16 scores stay in range.
    q = (q * dim**-0.5).reshape(n * heads, length, dim)
    scores = q @ k.reshape(n * heads, length, dim).transpose(1, 2)  # (n * heads, length, length)
    if causal:
        scores = scores + torch.full(
            (length, length), float("-inf"), device=q.device, dtype=scores.dtype
        ).triu(1)
    weights = scores.softmax(dim=-1)
    return (weights @ v.reshape(n * heads, length, dim)).view(n, heads, length, dim)


@functools.cache
def _onednn_op(dtype: torch.dtype = torch.bfloat16) -> Any:
    """oneDNN's linear layer with a fused bias, or None where torch was built without it."""
    if not torch.backends.mkldnn.is_available():
        return None
    try:
        op = torch.ops.mkldnn._linear_pointwise
        x = torch.ones(2, 4, dtype=dtype)
        op(x, x, x[:, 0].contiguous(), "none", [], "")
        op.binary(x, x[:, :2].contiguous(), x, x[:, 0].contiguous(), "add")
    except (
        AttributeError,
        RuntimeError,
    ):  # a private operation: it may disappear, or need another processor
        return None
    return op


def uses_onednn(x: Tensor) -> bool:
    """Whether this input uses oneDNN's fused layer: bf16 autocast on a CPU, in eager mode."""
    return (
        x.device.type == "cpu"
        and x.dtype == torch.bfloat16
        and torch.is_autocast_enabled("cpu")
        and torch.get_autocast_dtype("cpu") == torch.bfloat16
        and not torch.compiler.is_compiling()
        and _onednn_op() is not None
    )


@functools.cache
def _cpu_name() -> str:
    return read_machine_info(gpu=False).cpu


def _fp32_by_onednn() -> bool:
    """Whether oneDNN multiplies fp32 matrices: a caller may have turned it off meanwhile."""
    return bool(torch.backends.mkldnn.enabled) and _fp32_is_faster_by_onednn()


@functools.cache
def _fp32_is_faster_by_onednn() -> bool:
    """Whether oneDNN multiplies fp32 matrices faster than the BLAS of torch.

    MKL has no AVX-512 kernels for AMD's processors: half of the speed of oneDNN there, and 0.9 of
    it with AVX2 (docs/speed.md). A rule instead of a measurement: a resumed run is bit-identical.
    """
    is_mkl = torch.backends.mkl.is_available()
    return is_mkl and "AMD" in _cpu_name() and _onednn_op(torch.float32) is not None


def _fp32_weight_grads_by_onednn() -> bool:
    """Whether this holds for gradients of weights too: with AVX2, the transposed copy costs more."""
    return _fp32_by_onednn() and torch.backends.cpu.get_cpu_capability() == "AVX512"


def _onednn_takes(dtype: torch.dtype) -> bool:
    return _fp32_by_onednn() if dtype == torch.float32 else _onednn_op() is not None


def uses_cpu_functions(x: Tensor) -> bool:
    """Whether this input is computed by `_Linear` and `_Mlp`, which are for training on a CPU."""
    if x.device.type != "cpu" or torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return False
    if not x.numel():  # oneDNN multiplies no empty matrices in fp32
        return False
    autocast = torch.is_autocast_enabled("cpu")
    dtype = torch.get_autocast_dtype("cpu") if autocast else torch.float32
    return x.dtype == dtype and dtype in (torch.float32, torch.bfloat16)


Approximate = Literal["none", "tanh"]  # of GELU, as torch names it
Packed = TypeVar("Packed")
_prepacked = WeakTensorKeyDictionary()  # parameter -> (its state, the copy that kernels take)


def prepack(parameter: Tensor, pack: Callable[[Tensor], Packed], *key: object) -> Packed:
    """`pack(parameter)`; in inference mode its result is cached.

    It is recomputed when the parameter or `key` changes, or a model starts to train.
    """
    if (
        not torch.is_inference_mode_enabled()
        or not isinstance(parameter, nn.Parameter)
        or parameter.is_inference()
    ):
        return pack(parameter)
    state = (parameter._version, parameter.data_ptr(), key)
    entry = _prepacked.get(parameter)
    if entry is None or entry[0] != state:
        entry = _prepacked[parameter] = (state, pack(parameter.detach()))
    return cast("Packed", entry[1])


def clear_prepacked() -> None:
    """Free all packed copies.

    Called when a model's mode changes, since optimizers may write past the version count.
    """
    _prepacked.clear()


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: nn.LayerNorm | None = None,
    residual: Tensor | None = None,
    gelu: bool = False,
    approximate: Approximate = "none",
) -> Tensor:
    """F.linear of the input, or of its layer norm, in the precision of the input.

    Then GELU where asked for; added to `residual` where given.
    """
    one_dtype = residual is None or residual.dtype == x.dtype
    if one_dtype and infers() and uses_onednn(x):
        y = x if norm is None else layer_norm(x, *norm_arguments(norm))[0]
        matrix = prepack(weight, _pack_matrix)
        vector = None if bias is None else prepack(bias, to_bf16)
        return onednn_linear(y, matrix, vector, residual, gelu, approximate)
    if one_dtype and not gelu and uses_cpu_functions(x):
        return _Linear.apply(x, weight, bias, residual, *norm_arguments(norm))
    matrix = _cast_copy(weight, x)
    vector = None if bias is None else _cast_copy(bias, x)
    y = F.linear(x if norm is None else apply_norm(x, norm), matrix, vector)
    y = F.gelu(y, approximate=approximate) if gelu else y
    return y if residual is None else residual + y


def keeps_copies(x: Tensor) -> bool:
    """Whether to cache half-precision copies of parameters: autocast on CUDA, inference mode."""
    return (
        not torch.compiler.is_compiling()
        and x.is_cuda
        and torch.is_inference_mode_enabled()
        and torch.is_autocast_enabled("cuda")
        and torch.get_autocast_dtype("cuda") == x.dtype
    )


def _cast_copy(parameter: Tensor, x: Tensor) -> Tensor:
    """The parameter, or its copy in the precision of the input.

    Autocast would make one for each call.
    """
    return prepack(parameter, lambda p: p.to(x.dtype), x.dtype) if keeps_copies(x) else parameter


def apply_norm(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    """The layer norm in the precision of the input; autocast would also write it in float32."""
    if not keeps_copies(x):
        return norm(x).to(x.dtype)
    weight = _cast_copy(norm.weight, x)
    bias = _cast_copy(norm.bias, x)
    with torch.autocast(x.device.type, enabled=False):
        return F.layer_norm(x, norm.normalized_shape, weight, bias, norm.eps)


def _pack_matrix(weight: Tensor) -> Tensor:
    """In bf16 and in the order in which oneDNN reads it; otherwise each call would reorder it."""
    return cast("Tensor", torch.ops.mkldnn._reorder_linear_weight(to_bf16(weight)))


def onednn_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    gelu: bool = False,
    approximate: Approximate = "none",
) -> Tensor:
    """The oneDNN call for tensors of one precision."""
    if residual is None:
        after: tuple[str, list[float], str] = ("none", [], "")
        if gelu:
            after = ("gelu", [], approximate)
        return _onednn_op(x.dtype)(x, weight, bias, *after)
    return _onednn_op(x.dtype).binary(x, residual, weight, bias, "add")


def to_bf16(parameter: Tensor) -> Tensor:
    return parameter.detach().to(torch.bfloat16)


def _affine(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """x @ weight.T + bias + residual of 2-D tensors, in the precision of `x`."""
    weight = weight.detach().to(x.dtype)
    bias = None if bias is None else bias.detach().to(x.dtype)
    if _onednn_takes(x.dtype):
        return onednn_linear(x, weight, bias, residual)
    y = F.linear(x, weight, bias)
    return y if residual is None else y.add_(residual)


def _input_grad(grad: Tensor, weight: Tensor) -> Tensor:
    """grad @ weight: the gradient of a layer's input, in the precision of `grad`."""
    weight = weight.detach().to(grad.dtype)
    if grad.dtype == torch.float32 and _fp32_by_onednn():
        return onednn_linear(grad, weight.t(), None)
    return grad @ weight


def _weight_grad(grad: Tensor, x: Tensor) -> Tensor:
    """grad.T @ x: the gradient of a layer's weight."""
    if grad.dtype != torch.float32 or not _fp32_weight_grads_by_onednn():
        return grad.t() @ x
    # torch copies the transposed first operand, which should be the smaller one.
    if grad.shape[1] <= x.shape[1]:
        return onednn_linear(grad.t(), x.t(), None)
    return onednn_linear(x.t(), grad.t(), None).t().contiguous()


def norm_arguments(norm: nn.LayerNorm | None) -> tuple[Tensor | None, Tensor | None, float]:
    """A layer norm as arguments of an autograd function."""
    return (None, None, 0.0) if norm is None else (norm.weight, norm.bias, norm.eps)


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, ...]:
    """(rows, width) -> the layer norm of each row, its mean and its deviation.

    `x` itself where there is no norm.
    """
    return (x,) if weight is None else torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)


def layer_norm_backward(
    grad: Tensor | None,
    x: Tensor,
    stats: Sequence[Tensor],
    weight: Tensor | None,
    bias: Tensor | None,
    needs: list[bool],
) -> tuple[Tensor | None, ...]:
    """Gradients of the norm's input, weight and bias for that of its output."""
    if weight is None or grad is None:
        return grad, None, None
    return torch.ops.aten.native_layer_norm_backward(
        grad, x, x.shape[-1:], *stats, weight, bias, needs
    )


class _Linear(torch.autograd.Function):
    """Input in bf16 or fp32, parameters and their gradients in their own dtype (fp32).

    A layer norm is recomputed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        norm: Tensor | None,
        norm_bias: Tensor | None,
        eps: float,
    ) -> Tensor:
        flat = x.flatten(0, -2)
        # Not a bf16 copy: casting again takes 0.3% of the matmuls' time; saved copies would be half
        # a model.
        ctx.save_for_backward(flat, weight, norm, norm_bias)
        ctx.dtype = weight.dtype
        ctx.eps = eps
        added = None if residual is None else residual.flatten(0, -2)
        y = layer_norm(flat, norm, norm_bias, eps)[0]
        return _affine(y, weight, bias, added).view(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        flat, weight, norm, norm_bias = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, needs_residual, *needs_norm, _ = ctx.needs_input_grad
        g = grad.reshape(-1, grad.shape[-1])
        y, *stats = layer_norm(flat, norm, norm_bias, ctx.eps)
        dweight, dbias = parameter_grads(g, y, ctx.dtype, needs_weight, needs_bias)
        del y
        dy = _input_grad(g, weight) if needs_x or any(needs_norm) else None
        dx, dnorm, dnorm_bias = layer_norm_backward(
            dy, flat, stats, norm, norm_bias, [needs_x, *needs_norm]
        )
        dx = None if dx is None else dx.view(*grad.shape[:-1], flat.shape[1])
        return dx, dweight, dbias, grad if needs_residual else None, dnorm, dnorm_bias, None


def parameter_grads(
    grad: Tensor, x: Tensor, dtype: torch.dtype, weight: bool, bias: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of a layer's weight and bias for the output's gradient and the input, both 2-D."""
    dweight = _weight_grad(grad, x).to(dtype) if weight else None
    return dweight, grad.sum(0).to(dtype) if bias else None


def recompute(
    module: nn.Module, function: Callable[..., Tensor], x: Tensor, *rest: object
) -> Tensor:
    """function(x, *rest), a method of the module, with activation checkpointing."""
    sharded = hasattr(module, "unshard")  # by fully_shard: its parameters are not yet gathered here
    if x.device.type == "cpu" and not sharded and not torch.compiler.is_compiling():
        trainable = [p for p in module.parameters() if p.requires_grad]
        return cast("Tensor", _Recompute.apply(function, rest, x, *trainable))
    # Our blocks draw no random numbers, and a CUDA graph cannot capture reading the random state.
    return cast(
        "Tensor", checkpoint(function, x, *rest, use_reentrant=False, preserve_rng_state=False)
    )


class _Recompute(torch.autograd.Function):
    """The function without a graph, and once more with one when its gradient is needed."""

    @staticmethod
    def forward(
        ctx: Any,
        function: Callable[..., Tensor],
        rest: tuple[object, ...],
        x: Tensor,
        *trainable: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x, *trainable)
        ctx.function = function
        ctx.rest = rest
        ctx.autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        with _autocast(ctx):
            return function(x, *rest)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *trainable = ctx.saved_tensors
        x = x.detach().requires_grad_(ctx.needs_input_grad[2])
        inputs = [x, *trainable] if x.requires_grad else trainable
        with torch.enable_grad(), _autocast(ctx):
            y = ctx.function(x, *ctx.rest)
        gradients = gradients_from(y, grad, inputs)
        return None, None, *(() if x.requires_grad else (None,)), *gradients


def _autocast(ctx: Any) -> torch.autocast:
    """As in the forward pass.

    Without the cache, which would return weights that were cast without a graph.
    """
    on, dtype = ctx.autocast
    return torch.autocast("cpu", dtype=dtype, enabled=on, cache_enabled=False)


class Mlp(nn.Module):
    """Two linear layers with a GELU, or one of its approximations, between them."""

    def __init__(self, width: int, hidden: int, activation: Activation) -> None:
        super().__init__()
        self.activation = activation
        self.quick = activation == "quick_gelu"
        self.approximate: Approximate = _approximate(activation)
        self.use_triton = False
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(
        self, x: Tensor, residual: Tensor | None = None, norm: nn.LayerNorm | None = None
    ) -> Tensor:
        """(n, length, width) -> the same shape.

        Of the `norm` of `x`, and added to `residual`, where given.
        """
        if infers() and uses_onednn(x) and not self.quick:
            y = linear(x, self.up.weight, self.up.bias, norm, None, True, self.approximate)
            return linear(y, self.down.weight, self.down.bias, residual=residual)
        if uses_cpu_functions(x):
            parts = (self.up.weight, self.up.bias, self.down.weight, self.down.bias)
            return _Mlp.apply(x, *parts, residual, *norm_arguments(norm), self.activation)
        if self.use_triton and not self.quick and self.approximate == "none":
            from m1clip.cuda import kernels

            if kernels.takes(x):
                y = x if norm is None else apply_norm(x, norm)
                y = kernels.gelu_mlp(
                    y, self.up.weight, self.up.bias, self.down.weight, self.down.bias
                )
                return y if residual is None else residual + y
        x = linear(x, self.up.weight, self.up.bias, norm)
        x = linear(activate(x, self.activation), self.down.weight, self.down.bias)
        return x if residual is None else residual + x

    def mean(self, x: Tensor) -> Tensor:
        """(n, length, width) -> (n, width): the mean, taken before the second matmul."""
        x = activate(linear(x, self.up.weight, self.up.bias), self.activation).mean(dim=1)
        return linear(x, self.down.weight, self.down.bias)


def _approximate(activation: Activation) -> Approximate:
    return "tanh" if activation == "gelu_tanh" else "none"


QUICK_GELU_SLOPE = 1.702  # of the sigmoid that approximates the normal distribution


def activate(x: Tensor, activation: Activation) -> Tensor:
    """GELU, or one of its approximations."""
    if activation == "quick_gelu":
        return x * torch.sigmoid(QUICK_GELU_SLOPE * x)
    return F.gelu(x, approximate=_approximate(activation))


def _activation_grad_(grad: Tensor, x: Tensor, activation: Activation) -> Tensor:
    """The gradient of the input of `activate` for that of its output, which it overwrites."""
    if activation != "quick_gelu":
        return torch.ops.aten.gelu_backward.grad_input(
            grad, x, approximate=_approximate(activation), grad_input=grad
        )
    gate = torch.sigmoid(QUICK_GELU_SLOPE * x)
    slope = torch.addcmul(gate, x, gate * (1 - gate), value=QUICK_GELU_SLOPE)
    return grad.mul_(slope)


class _Mlp(torch.autograd.Function):
    """The complete MLP on the CPU.

    The backward pass recomputes the norm and the activation, the largest tensor of a block and the
    cheapest to recompute (docs/speed.md).
    """

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
        activation: Activation,
    ) -> Tensor:
        flat = x.flatten(0, -2)
        hidden = _affine(layer_norm(flat, norm, norm_bias, eps)[0], up, up_bias, None)
        ctx.save_for_backward(flat, hidden, up, down, norm, norm_bias)
        ctx.dtype = up.dtype
        ctx.eps = eps
        ctx.activation = activation
        added = None if residual is None else residual.flatten(0, -2)
        return _affine(activate(hidden, activation), down, down_bias, added).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        flat, hidden, up, down, norm, norm_bias = ctx.saved_tensors
        (
            needs_x,
            needs_up,
            needs_up_bias,
            needs_down,
            needs_down_bias,
            needs_residual,
            *needs_norm,
            _,
            _,
        ) = ctx.needs_input_grad
        g = grad.reshape(-1, grad.shape[-1])
        active = activate(hidden, ctx.activation) if needs_down else g
        ddown, ddown_bias = parameter_grads(g, active, ctx.dtype, needs_down, needs_down_bias)
        del active
        dhidden = _activation_grad_(_input_grad(g, down), hidden, ctx.activation)
        y, *stats = layer_norm(flat, norm, norm_bias, ctx.eps)
        dup, dup_bias = parameter_grads(dhidden, y, ctx.dtype, needs_up, needs_up_bias)
        del y
        dy = _input_grad(dhidden, up) if needs_x or any(needs_norm) else None
        dx, dnorm, dnorm_bias = layer_norm_backward(
            dy, flat, stats, norm, norm_bias, [needs_x, *needs_norm]
        )
        dx = None if dx is None else dx.view(grad.shape)
        dresidual = grad if needs_residual else None
        return dx, dup, dup_bias, ddown, ddown_bias, dresidual, dnorm, dnorm_bias, None, None


Position = Tensor | int  # (n,) a position for each sequence, or one for all


def take_position(x: Tensor, position: Position) -> Tensor:
    """(n, length, width) -> (n, width): one position of each sequence."""
    return (
        x[:, position]
        if isinstance(position, int)
        else x[torch.arange(x.shape[0], device=x.device), position]
    )


def _call(block: nn.Module, function: Callable[..., Tensor], *inputs: object) -> Tensor:
    return function(*inputs)


class Attention(nn.Module):
    """Multi-head self-attention with one fused matrix for queries, keys and values."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.kind: AttentionKind = "auto"
        self.use_triton = False
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(
        self, x: Tensor, residual: Tensor | None = None, norm: nn.LayerNorm | None = None
    ) -> Tensor:
        """(n, length, width) -> the same shape.

        Of the `norm` of `x`, and added to `residual`, where given.
        """
        return linear(self._attend(x, norm), self.out.weight, self.out.bias, residual=residual)

    def _attend(self, x: Tensor, norm: nn.LayerNorm | None) -> Tensor:
        """The output of all heads, side by side: (n, length, width)."""
        n, length, width = x.shape
        if self.use_triton and self.kind != "bmm":
            from m1clip.cuda import kernels

            if kernels.takes_attention(x, self.heads):
                y = x if norm is None else apply_norm(x, norm)
                return kernels.short_attention(
                    y, self.qkv.weight, self.qkv.bias, self.heads, self.causal
                )
        qkv = linear(x, self.qkv.weight, self.qkv.bias, norm).view(
            n, length, 3, self.heads, width // self.heads
        )
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (n, heads, length, dim)
        return attention(q, k, v, self.causal, self.kind).transpose(1, 2).reshape(n, length, width)

    def at(self, x: Tensor, position: Position) -> Tensor:
        """(n, width): the output of `forward` at one position of each sequence, by one query."""
        n, length, width = x.shape
        weight = self.qkv.weight
        bias = self.qkv.bias
        heads = self.heads
        q = linear(take_position(x, position), weight[:width], bias[:width]).view(
            n, heads, 1, width // heads
        )
        kv = linear(x, weight[width:], bias[width:]).view(n, length, 2, heads, width // heads)
        k, v = kv.permute(2, 0, 3, 1, 4).unbind(0)  # each (n, heads, length, dim)
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(2, 3)  # (n, heads, 1, length)
        if self.causal:
            later = torch.arange(length, device=x.device) > torch.as_tensor(
                position, device=x.device
            ).view(-1, 1, 1, 1)
            scores = scores.masked_fill(later, float("-inf"))
        attended = (scores.softmax(dim=-1) @ v).reshape(n, width)
        return linear(attended, self.out.weight, self.out.bias)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: VisionTowerConfig | TextTowerConfig, causal: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width, config.norm_eps)
        self.attn = Attention(config.width, config.heads, causal)
        self.norm2 = nn.LayerNorm(config.width, config.norm_eps)
        self.mlp = Mlp(config.width, config.hidden, config.activation)

    def forward(self, x: Tensor) -> Tensor:
        """(n, length, width) -> the same shape and dtype."""
        # Norm and sum are part of the matmuls where that is faster or takes less memory.
        x = self.attn(x, residual=x, norm=self.norm1)
        return self.mlp(x, residual=x, norm=self.norm2)

    def at(self, x: Tensor, position: Position) -> Tensor:
        """(n, width): the output of `forward` at one position of each sequence only."""
        y = take_position(x, position) + self.attn.at(apply_norm(x, self.norm1), position)
        return y + self.mlp(apply_norm(y, self.norm2))

    def mean(self, x: Tensor) -> Tensor:
        """(n, width): the mean of `forward` over the sequence; the last matmul follows the mean."""
        x = self.attn(x, residual=x, norm=self.norm1)
        return x.mean(dim=1) + self.mlp.mean(apply_norm(x, self.norm2))


class Transformer(nn.Module):
    """A stack of blocks, with activation checkpointing as a switch."""

    def __init__(self, config: VisionTowerConfig | TextTowerConfig, causal: bool) -> None:
        super().__init__()
        self.width = config.width
        self.activation_checkpointing = False
        self.blocks = nn.ModuleList(Block(config, causal) for _ in range(config.layers))

    def forward(self, x: Tensor, position: Position | Literal["mean"] | None = None) -> Tensor:
        """(n, length, width) -> the same shape, or (n, width) at one position or of the mean.

        The last block then computes only that: the same result for a twelfth less of ViT-B's work.
        """
        *earlier, last = self._all_blocks()
        run = recompute if self.activation_checkpointing and torch.is_grad_enabled() else _call
        for block in earlier:
            x = run(block, block, x)
        if position is None:
            return run(last, last, x)
        return (
            run(last, last.mean, x)
            if isinstance(position, str)
            else run(last, last.at, x, position)
        )

    def _all_blocks(self) -> Iterator[Block]:
        return iter(cast("Iterable[Block]", self.blocks))

    @torch.no_grad()
    def initialize(self, init: Init) -> None:
        """CLIP's scaled normal initialization; "zero" has residual branches of zeros."""
        branch = self.width**-0.5 * (2 * len(self.blocks)) ** -0.5
        for block in self._all_blocks():
            nn.init.normal_(block.attn.qkv.weight, std=self.width**-0.5)
            nn.init.normal_(block.mlp.up.weight, std=(2 * self.width) ** -0.5)
            for last in (block.attn.out, block.mlp.down):
                nn.init.normal_(last.weight, std=branch)
                if init == "zero":
                    nn.init.zeros_(last.weight)
            for layer in (block.attn.qkv, block.attn.out, block.mlp.up, block.mlp.down):
                nn.init.zeros_(layer.bias)


class AttentionPool(nn.Module):
    """SigLIP's pooling: a learned query reads the complete sequence, then x + mlp(norm(x))."""

    def __init__(self, config: VisionTowerConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query = nn.Parameter(torch.empty(config.width))
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.norm = nn.LayerNorm(config.width, config.norm_eps)
        self.mlp = Mlp(config.width, config.hidden, config.activation)

    def forward(self, x: Tensor) -> Tensor:
        """(n, length, width) -> (n, width)."""
        n, length, width = x.shape
        weight = self.qkv.weight
        bias = self.qkv.bias
        heads = self.heads
        # The query is the same for all images: (1, heads, 1, dim).
        q = linear(self.query.to(x.dtype)[None], weight[:width], bias[:width])
        q = q.view(1, heads, 1, width // heads)
        kv = linear(x, weight[width:], bias[width:]).view(n, length, 2, heads, width // heads)
        k, v = kv.permute(2, 0, 3, 1, 4).unbind(0)  # each (n, heads, length, dim)
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(2, 3)  # (n, heads, 1, length)
        attended = (scores.softmax(dim=-1).to(v.dtype) @ v).reshape(n, width)
        y = linear(attended, self.out.weight, self.out.bias)
        return y + self.mlp(apply_norm(y, self.norm))

    @torch.no_grad()
    def initialize(self) -> None:
        """Fan-in, with a query as long as a patch."""
        width = self.out.in_features
        nn.init.normal_(self.query, std=width**-0.5)
        for layer in (self.qkv, self.out, self.mlp.up, self.mlp.down):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
            nn.init.zeros_(layer.bias)
