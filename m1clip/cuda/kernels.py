"""Triton kernels for the bf16 step on CUDA: one pass over memory where torch.compile needs several.

- GELU by one exponential. Its gradient is computed together with that of the bias, which is the
  sum over rows.
- Attention over short sequences, as CLIP has them: a complete head fits into one tile, so only
  queries, keys and values are read, and their gradients are written where the next matmul needs
  them.

Imported only where they are used (`CLIP.use_triton`): triton comes with torch for CUDA only.

Used where a graph or the compiler launches them: one by one, the host takes longer to launch them
than torch's own (docs/speed.md).
"""

# No `from __future__ import annotations`: torch reads the types below to describe the operations to
# its compiler.
import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

from m1clip import console
from m1clip.errors import first_line

ROWS_PER_PROGRAM = 512  # rows that one program of a sum over rows reads
TILE_ROWS = 8  # rows that such a program reads at a time
TILE_COLUMNS = 256  # columns that it sums
FLAT = 2048  # elements per elementwise program
LONGEST = 96  # positions of a sequence: more do not fit into the shared memory of smaller cards
DIMS = (16, 32, 64)  # head dimensions: powers of two that tensor cores accept


def tiles_of(length: int) -> tuple[int, int]:
    """Tile lengths for a sequence, powers of two that tensor cores accept.

    77 is 64 and 16, because 128 is slow.
    """
    first = min(64, max(16, triton.next_power_of_2(length)))
    return first, max(16, triton.next_power_of_2(length - first)) if length > first else 0


@triton.jit
def _normal(x):
    """Return the cumulative distribution and the density of the normal distribution.

    By Abramowitz and Stegun 7.1.26, with an error below 1e-7.
    """
    t = 1.0 / (1.0 + 0.2316418882 * tl.abs(x))
    e = tl.exp2(-0.7213475204 * x * x)
    series = 0.254829592 + t * (
        -0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))
    )
    upper = 0.5 * t * series * e
    return tl.where(x > 0, 1.0 - upper, upper), 0.3989422804 * e


@triton.jit
def _gelu_kernel(x_at, out_at, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_at + at, mask=at < count).to(tl.float32)
    tl.store(out_at + at, (x * _normal(x)[0]).to(out_at.dtype.element_ty), mask=at < count)


@triton.jit
def _gelu_backward_kernel(
    grad_at,
    x_at,
    dx_at,
    sums_at,
    rows,
    columns,
    ROWS_PER_PROGRAM: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    column = tl.program_id(0) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    first = tl.program_id(1) * ROWS_PER_PROGRAM
    total = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    for start in range(0, ROWS_PER_PROGRAM, TILE_ROWS):
        row = first + start + tl.arange(0, TILE_ROWS)
        at = row.to(tl.int64)[:, None] * columns + column[None, :]
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        x = tl.load(x_at + at, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_at + at, mask=inside, other=0.0).to(tl.float32)
        below, density = _normal(x)
        dx = grad * (below + x * density)
        total += dx
        tl.store(dx_at + at, dx.to(dx_at.dtype.element_ty), mask=inside)
    tl.store(sums_at + tl.program_id(1) * columns + column, tl.sum(total, 0), mask=column < columns)


@triton.jit
def _rows(base, row, length, stride, D: tl.constexpr):
    """Load rows of one head, which are strided; zeros past the end of the sequence."""
    dim = tl.arange(0, D)
    return tl.load(
        base + row[:, None] * stride + dim[None, :], mask=(row < length)[:, None], other=0.0
    )


@triton.jit
def _put(base, row, length, stride, values, D: tl.constexpr):
    dim = tl.arange(0, D)
    addresses = base + row[:, None] * stride + dim[None, :]
    tl.store(addresses, values.to(base.dtype.element_ty), mask=(row < length)[:, None])


@triton.jit
def _scores(k, q, key, query, length, scale, CAUSAL: tl.constexpr):
    """Return the attention scores (keys, queries), as exponents of 2."""
    is_visible = key[:, None] < length
    if CAUSAL:
        is_visible = is_visible & (key[:, None] <= query[None, :])
    return tl.where(
        is_visible, tl.dot(k, tl.trans(q)) * (scale * 1.4426950408889634), float("-inf")
    )


@triton.jit
def _softmax(scores):
    weights = tl.exp2(scores - tl.max(scores, 0)[None, :])
    return weights / tl.sum(weights, 0)[None, :]


@triton.jit
def _softmax_of_two(scores, others):
    """Return the softmax over the keys of two tiles together."""
    largest = tl.maximum(tl.max(scores, 0), tl.max(others, 0))[None, :]
    weights = tl.exp2(scores - largest)
    rest = tl.exp2(others - largest)
    total = (tl.sum(weights, 0) + tl.sum(rest, 0))[None, :]
    return weights / total, rest / total


@triton.jit
def _attention_kernel(
    qkv_at,
    out_at,
    length,
    scale,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    T: tl.constexpr,
    REST: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    sequence = (tl.program_id(0) // HEADS).to(tl.int64)
    head = tl.program_id(0) % HEADS
    width = HEADS * D
    begin = qkv_at + sequence * length * 3 * width + head * D
    out = out_at + sequence * length * width + head * D
    row = tl.arange(0, T)
    q = _rows(begin, row, length, 3 * width, D)
    k = _rows(begin + width, row, length, 3 * width, D)
    v = _rows(begin + 2 * width, row, length, 3 * width, D)
    scores = _scores(k, q, row, row, length, scale, CAUSAL)
    if REST == 0:
        weights = _softmax(scores).to(v.dtype)
        _put(out, row, length, width, tl.dot(tl.trans(weights), v), D)
    else:
        late = T + tl.arange(0, REST)
        q2 = _rows(begin, late, length, 3 * width, D)
        k2 = _rows(begin + width, late, length, 3 * width, D)
        v2 = _rows(begin + 2 * width, late, length, 3 * width, D)
        weights, others = _softmax_of_two(scores, _scores(k2, q, late, row, length, scale, CAUSAL))
        attended = tl.dot(tl.trans(weights.to(v.dtype)), v) + tl.dot(
            tl.trans(others.to(v.dtype)), v2
        )
        _put(out, row, length, width, attended, D)
        weights, others = _softmax_of_two(
            _scores(k, q2, row, late, length, scale, CAUSAL),
            _scores(k2, q2, late, late, length, scale, CAUSAL),
        )
        attended = tl.dot(tl.trans(weights.to(v.dtype)), v) + tl.dot(
            tl.trans(others.to(v.dtype)), v2
        )
        _put(out, late, length, width, attended, D)


@triton.jit
def _attention_backward_kernel(
    qkv_at,
    grad_at,
    dqkv_at,
    sums_at,
    length,
    scale,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    T: tl.constexpr,
    REST: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    sequence = (tl.program_id(0) // HEADS).to(tl.int64)
    head = tl.program_id(0) % HEADS
    width = HEADS * D
    begin = qkv_at + sequence * length * 3 * width + head * D
    there = dqkv_at + sequence * length * 3 * width + head * D
    grads = grad_at + sequence * length * width + head * D
    sums = sums_at + sequence * 3 * width + head * D + tl.arange(0, D)
    row = tl.arange(0, T)
    q = _rows(begin, row, length, 3 * width, D)
    k = _rows(begin + width, row, length, 3 * width, D)
    v = _rows(begin + 2 * width, row, length, 3 * width, D)
    g = _rows(grads, row, length, width, D)
    scores = _scores(k, q, row, row, length, scale, CAUSAL)
    dweights = tl.dot(v, tl.trans(g))
    if REST == 0:
        weights = _softmax(scores)
        dv = tl.dot(weights.to(g.dtype), g)
        dscores = weights * (dweights - tl.sum(weights * dweights, 0)[None, :]) * scale
        narrow = dscores.to(q.dtype)
        dk = tl.dot(narrow, q)
        dq = tl.dot(tl.trans(narrow), k)
        tl.store(sums, tl.sum(dq, 0))
        tl.store(sums + width, tl.sum(dk, 0))
        tl.store(sums + 2 * width, tl.sum(dv, 0))
    else:
        late = T + tl.arange(0, REST)
        q2 = _rows(begin, late, length, 3 * width, D)
        k2 = _rows(begin + width, late, length, 3 * width, D)
        v2 = _rows(begin + 2 * width, late, length, 3 * width, D)
        g2 = _rows(grads, late, length, width, D)
        # The queries of the first tile, over the keys of both.
        weights, others = _softmax_of_two(scores, _scores(k2, q, late, row, length, scale, CAUSAL))
        dv = tl.dot(weights.to(g.dtype), g)
        dv2 = tl.dot(others.to(g.dtype), g)
        dothers = tl.dot(v2, tl.trans(g))
        mean = (tl.sum(weights * dweights, 0) + tl.sum(others * dothers, 0))[None, :]
        narrow = (weights * (dweights - mean) * scale).to(q.dtype)
        narrow2 = (others * (dothers - mean) * scale).to(q.dtype)
        dk = tl.dot(narrow, q)
        dk2 = tl.dot(narrow2, q)
        dq = tl.dot(tl.trans(narrow), k) + tl.dot(tl.trans(narrow2), k2)
        # The queries of the second tile.
        weights, others = _softmax_of_two(
            _scores(k, q2, row, late, length, scale, CAUSAL),
            _scores(k2, q2, late, late, length, scale, CAUSAL),
        )
        dv += tl.dot(weights.to(g.dtype), g2)
        dv2 += tl.dot(others.to(g.dtype), g2)
        dweights = tl.dot(v, tl.trans(g2))
        dothers = tl.dot(v2, tl.trans(g2))
        mean = (tl.sum(weights * dweights, 0) + tl.sum(others * dothers, 0))[None, :]
        narrow = (weights * (dweights - mean) * scale).to(q.dtype)
        narrow2 = (others * (dothers - mean) * scale).to(q.dtype)
        dk += tl.dot(narrow, q2)
        dk2 += tl.dot(narrow2, q2)
        dq2 = tl.dot(tl.trans(narrow), k) + tl.dot(tl.trans(narrow2), k2)
        _put(there, late, length, 3 * width, dq2, D)
        _put(there + width, late, length, 3 * width, dk2, D)
        _put(there + 2 * width, late, length, 3 * width, dv2, D)
        tl.store(sums, tl.sum(dq, 0) + tl.sum(dq2, 0))
        tl.store(sums + width, tl.sum(dk, 0) + tl.sum(dk2, 0))
        tl.store(sums + 2 * width, tl.sum(dv, 0) + tl.sum(dv2, 0))
    _put(there, row, length, 3 * width, dq, D)
    _put(there + width, row, length, 3 * width, dk, D)
    _put(there + 2 * width, row, length, 3 * width, dv, D)


@custom_op("m1clip::gelu", mutates_args=())
def gelu(x: Tensor) -> Tensor:
    """Compute the exact GELU of a contiguous tensor."""
    out = torch.empty_like(x)
    _gelu_kernel[(triton.cdiv(x.numel(), FLAT),)](x, out, x.numel(), BLOCK=FLAT, num_warps=4)
    return out


@gelu.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@custom_op("m1clip::gelu_backward", mutates_args=())
def gelu_backward(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of the input (rows, columns), and its sum over rows."""
    rows, columns = x.shape
    dx = torch.empty_like(x)
    parts = triton.cdiv(rows, ROWS_PER_PROGRAM)
    sums = torch.empty(parts, columns, device=x.device, dtype=torch.float32)
    _gelu_backward_kernel[(triton.cdiv(columns, TILE_COLUMNS), parts)](
        grad,
        x,
        dx,
        sums,
        rows,
        columns,
        ROWS_PER_PROGRAM=ROWS_PER_PROGRAM,
        TILE_ROWS=TILE_ROWS,
        TILE_COLUMNS=TILE_COLUMNS,
        num_warps=8,
    )
    return dx, sums.sum(0)


@gelu_backward.register_fake
def _(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape[1], dtype=torch.float32)


@custom_op("m1clip::attention", mutates_args=())
def attention(qkv: Tensor, sequences: int, heads: int, causal: bool) -> Tensor:
    """Attend within sequences of up to `LONGEST` positions.

    (sequences * length, 3 * width) -> (sequences * length, width)
    """
    length = qkv.shape[0] // sequences
    width = qkv.shape[1] // 3
    out = torch.empty(qkv.shape[0], width, device=qkv.device, dtype=qkv.dtype)
    dim = width // heads
    tile, rest = tiles_of(length)
    _attention_kernel[(heads * sequences,)](
        qkv,
        out,
        length,
        dim**-0.5,
        HEADS=heads,
        D=dim,
        T=tile,
        REST=rest,
        CAUSAL=causal,
        num_warps=4,
    )
    return out


@attention.register_fake
def _(qkv: Tensor, sequences: int, heads: int, causal: bool) -> Tensor:
    # With len() the compiler would fix the batch size.
    return qkv.new_empty(qkv.shape[0], qkv.shape[1] // 3)


@custom_op("m1clip::attention_backward", mutates_args=())
def attention_backward(
    grad: Tensor, qkv: Tensor, sequences: int, heads: int, causal: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradient of `qkv`, and its sum over rows."""
    length = qkv.shape[0] // sequences
    width = qkv.shape[1] // 3
    dqkv = torch.empty_like(qkv)
    dim = width // heads
    tile, rest = tiles_of(length)
    sums = torch.empty(sequences, 3 * width, device=qkv.device, dtype=torch.float32)
    _attention_backward_kernel[(heads * sequences,)](
        qkv,
        grad,
        dqkv,
        sums,
        length,
        dim**-0.5,
        HEADS=heads,
        D=dim,
        T=tile,
        REST=rest,
        CAUSAL=causal,
        num_warps=4,
    )
    return dqkv, sums.sum(0)


@attention_backward.register_fake
def _(grad: Tensor, qkv: Tensor, sequences: int, heads: int, causal: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(qkv), qkv.new_empty(qkv.shape[1], dtype=torch.float32)


KERNEL_DTYPE = torch.bfloat16


@functools.cache
def compile_here() -> bool:
    """Whether triton can compile these kernels for this GPU; if not, the user is told why."""
    dim = max(DIMS)
    try:
        gradients = torch.zeros(LONGEST, dim, dtype=KERNEL_DTYPE, device="cuda")
        qkv = torch.zeros(LONGEST, 3 * dim, dtype=KERNEL_DTYPE, device="cuda")
        attention_backward(gradients, qkv, 1, 1, True)  # it needs the most shared memory
    # Without a C compiler or Python's headers, or for a GPU that triton does not know, it raises
    # errors of many types: of its own, of the compiler's process, of the loader.
    except Exception as error:  # noqa: BLE001
        console.warn(
            f"steps are slower than they could be, because triton does not work: {first_line(error)}"
        )
        return False
    return True


def takes(x: Tensor) -> bool:
    """Whether these kernels apply to an input: bf16 on CUDA."""
    return x.is_cuda and x.dtype == KERNEL_DTYPE


def takes_attention(x: Tensor, heads: int) -> bool:
    """Whether a head of this (n, length, width) input is short and narrow enough for our kernel."""
    return takes(x) and x.shape[1] <= LONGEST and x.shape[2] // heads in DIMS


def gelu_mlp(x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor) -> Tensor:
    """Two linear layers of an input in bf16, with a GELU between them; the weights may be fp32."""
    out: Tensor = _GeluMlp.apply(x, up, up_bias, down, down_bias)
    return out


def short_attention(x: Tensor, weight: Tensor, bias: Tensor, heads: int, causal: bool) -> Tensor:
    """Compute attention up to the output projection: (n, length, width) -> (n, length, width)."""
    out: Tensor = _ShortAttention.apply(x, weight, bias, heads, causal)
    return out


class _GeluMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor
    ) -> Tensor:
        flat = x.flatten(0, -2)
        up_weight = up.to(KERNEL_DTYPE)
        down_weight = down.to(KERNEL_DTYPE)
        hidden = torch.addmm(up_bias.to(KERNEL_DTYPE), flat, up_weight.t())
        active = gelu(hidden)
        ctx.save_for_backward(flat, hidden, active, up_weight, down_weight)
        ctx.dtype = up.dtype
        return torch.addmm(down_bias.to(KERNEL_DTYPE), active, down_weight.t()).view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        flat, hidden, active, up_weight, down_weight = ctx.saved_tensors
        g = grad.reshape(-1, grad.shape[-1])
        dhidden, dup_bias = gelu_backward(g @ down_weight, hidden)
        ddown = (g.t() @ active).to(ctx.dtype)
        dup = (dhidden.t() @ flat).to(ctx.dtype)
        dx = (dhidden @ up_weight).view(grad.shape)
        return dx, dup, dup_bias.to(ctx.dtype), ddown, g.sum(0, dtype=torch.float32).to(ctx.dtype)


class _ShortAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, heads: int, causal: bool
    ) -> Tensor:
        flat = x.flatten(0, -2)
        narrow = weight.to(KERNEL_DTYPE)
        qkv = torch.addmm(bias.to(KERNEL_DTYPE), flat, narrow.t())
        ctx.save_for_backward(flat, narrow, qkv)
        ctx.sizes = (x.shape[0], heads, causal)
        ctx.dtype = weight.dtype
        return attention(qkv, x.shape[0], heads, causal).view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        flat, narrow, qkv = ctx.saved_tensors
        g = grad.reshape(-1, grad.shape[-1]).contiguous()
        dqkv, dbias = attention_backward(g, qkv, *ctx.sizes)
        dx = (dqkv @ narrow).view(grad.shape)
        return dx, (dqkv.t() @ flat).to(ctx.dtype), dbias.to(ctx.dtype), None, None
