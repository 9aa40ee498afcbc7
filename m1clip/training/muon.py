"""Muon: orthogonalized momentum updates for hidden matrices, like torch.optim.Muon but batched.

Newton-Schulz runs once for all matrices of a shape, as batched products: many small products leave a CPU half
idle (256 x 256 on two cores: 200 GFLOP/s one by one, 380 batched).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

if TYPE_CHECKING:
    CompilableOptimizer = Optimizer
    AdamW = torch.optim.AdamW
else:

    class CompilableOptimizer(Optimizer):
        """torch's methods without the wrappers that the compiler cannot trace."""

        add_param_group = inspect.unwrap(Optimizer.add_param_group)
        zero_grad = inspect.unwrap(Optimizer.zero_grad)
        state_dict = inspect.unwrap(Optimizer.state_dict)
        load_state_dict = inspect.unwrap(Optimizer.load_state_dict)

    class AdamW(CompilableOptimizer, torch.optim.AdamW):
        """torch.optim.AdamW with the same step."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            """Update every parameter that has a gradient."""
            return inspect.unwrap(torch.optim.AdamW.step)(self, closure)


EPS = 1e-7
MAX_COLUMNS = 32_766  # in one product: MPS sums longer rows wrong on M1 and M2 (pytorch#195163)
MAX_CPU_STACK = 2**24  # numbers in a batch of matrices: 64 MB of float32
Quintic = tuple[float, float, float]  # a x + b x^3 + c x^5
# Four minimax quintics for singular values from 0.003 of the largest to 1 (the method of Polar Express, 2025), where
# torch.optim.Muon applies one quintic five times. Values above 1 would diverge, so all but the last expect up to
# 3, then 2% more than the bound.
QUINTICS: tuple[Quintic, ...] = (
    (8.1394889, -22.6643122, 15.8349801),
    (3.9641377, -2.8377142, 0.5158247),
    (3.4368339, -2.4751546, 0.4761603),
    (2.4901159, -1.8342751, 0.4368347),
)


def orthogonalize(x: Tensor) -> Tensor:
    """(k, m, n) with m <= n -> each matrix with its singular values brought close to 1, in the dtype of `x`."""
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=EPS)
    gram = _gram(x)
    square = torch.bmm(gram, gram)
    # The fourth root of the sum of s^8 bounds the largest s^2, within a few percent where few values are large.
    bound = torch.linalg.vector_norm(square, dim=(1, 2), keepdim=True).sqrt().clamp(min=EPS)
    gram, square = gram / bound, square / bound**2
    factor = _quintic_factor(gram, square, QUINTICS[0]) * bound.rsqrt()
    wide = x.shape[2] >= 2 * x.shape[1]
    for number, quintic in enumerate(QUINTICS[1:], start=1):
        if wide and number % 2:
            # Two iterations on the small Gram matrix before using the wide one; more would lose precision in bf16.
            gram = torch.bmm(torch.bmm(factor, gram), factor) * (bound if number == 1 else 1)
            factor = torch.bmm(_quintic_factor(gram, torch.bmm(gram, gram), quintic), factor)
            continue
        x = torch.bmm(factor, x)
        gram = _gram(x)
        factor = _quintic_factor(gram, torch.bmm(gram, gram), quintic)
    return torch.bmm(factor, x)


def _gram(x: Tensor) -> Tensor:
    """(k, m, n) -> the products (k, m, m) of the rows of each matrix."""
    first, *rest = (torch.bmm(part, part.transpose(1, 2)) for part in x.split(MAX_COLUMNS, dim=2))
    for part in rest:
        first += part
    return first


def _quintic_factor(gram: Tensor, square: Tensor, quintic: Quintic) -> Tensor:
    """a + b gram + c gram^2, by which an iteration multiplies the matrix."""
    a, b, c = quintic
    factor = torch.add(b * gram, square, alpha=c)
    factor.diagonal(dim1=1, dim2=2).add_(a)
    return factor


class _Matrix(NamedTuple):
    """A parameter as a matrix, its gradient and momentum."""

    weight: Tensor
    grad: Tensor
    momentum: Tensor

    @property
    def tall(self) -> bool:
        return self.weight.shape[0] > self.weight.shape[1]

    @property
    def sides(self) -> tuple[int, int]:
        rows, columns = self.weight.shape
        return min(rows, columns), max(rows, columns)

    @property
    def cost(self) -> int:
        """Of a product with its transpose, relative to others."""
        return self.sides[0] ** 2 * self.sides[1]


class Muon(CompilableOptimizer):
    """torch.optim.Muon with Newton-Schulz batched over equal shapes: the same state, names and update.

    `dtype` is that of the products (bf16 where it is fast, as in torch, else fp32). The learning rate may be a tensor
    on the device, so that a captured step can be replayed with another one. A `found_inf` of 1 on the device skips the
    step there, as in torch's fused optimizers; gradients are 0 then.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self.dtype = dtype
        # Rank, number of ranks, and a function that gathers a tensor from all: each orthogonalizes a part.
        self.share: tuple[int, int, Callable[[Tensor], Tensor]] | None = None
        if any(p.ndim < 2 for group in self.param_groups for p in group["params"]):
            raise ValueError("Muon takes matrices and convolutions only")

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._step_group(group, params)

    def _step_group(self, group: dict[str, Any], params: list[Tensor]) -> None:
        lr, momentum = group["lr"], group["momentum"]
        skip: Tensor | None = getattr(self, "found_inf", None)
        grads = [p.grad for p in params if p.grad is not None]
        buffers = [self._momentum(p) for p in params]
        if skip is None:
            torch._foreach_lerp_(buffers, grads, 1 - momentum)
        else:
            # The same with a weight on the device that is 0 if the step is skipped; gradients are then 0.
            torch._foreach_mul_(buffers, 1 - (1 - momentum) * (1 - skip))
            torch._foreach_add_(buffers, grads, alpha=1 - momentum)
        decay = lr * group["weight_decay"]
        torch._foreach_mul_(params, 1 - decay if skip is None else 1 - decay * (1 - skip))

        # A convolution is a matrix from its receptive field to its output channels.
        each = zip(params, grads, buffers, strict=True)
        matrices = [_Matrix(p.flatten(1), grad.flatten(1), buffer.flatten(1)) for p, grad, buffer in each]
        if self.share is None:
            for stack in _bounded(matrices):
                x = self._orthogonal(stack, momentum)
                _add_updates(stack, x if skip is None else x * (1 - skip).to(x.dtype), lr)
            return
        rank, ranks, gather = self.share
        parts = divided([m.cost for m in matrices], ranks)
        flat = torch.zeros(
            max(sum(matrices[place].weight.numel() for place in part) for part in parts),
            dtype=self.dtype,
            device=matrices[0].weight.device,
        )
        updates = _views(flat, [matrices[place] for place in parts[rank]])
        own = {id(matrices[place]): update for place, update in zip(parts[rank], updates, strict=True)}
        for stack in _bounded([matrices[place] for place in parts[rank]]):
            torch._foreach_copy_([own[id(m)] for m in stack], list(self._orthogonal(stack, momentum)))
        for part, row in zip(parts, gather(flat), strict=True):
            owned = [matrices[place] for place in part]
            by_matrix = {id(m): update for m, update in zip(owned, _views(row, owned), strict=True)}
            for stack in _bounded(owned):
                x = torch.stack([by_matrix[id(m)] for m in stack])
                _add_updates(stack, x if skip is None else x * (1 - skip).to(x.dtype), lr)

    def _orthogonal(self, matrices: list[_Matrix], momentum: float) -> Tensor:
        """The updates of matrices of one shape, transposed where tall."""
        x = torch.empty((len(matrices), *matrices[0].sides), dtype=self.dtype, device=matrices[0].weight.device)
        # Nesterov momentum for one shape at a time: for all at once it would need the memory of one more gradient.
        nesterov = torch._foreach_lerp([m.grad for m in matrices], [m.momentum for m in matrices], momentum)
        # Cast, and transposed where tall, in one pass.
        torch._foreach_copy_(list(x), [u.t() if m.tall else u for m, u in zip(matrices, nesterov, strict=True)])
        del nesterov
        return orthogonalize(x)

    def _momentum(self, p: Tensor) -> Tensor:
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        return state["momentum_buffer"]


def _bounded(matrices: Sequence[_Matrix]) -> Iterator[list[_Matrix]]:
    """Stacks of one shape, split on the CPU to bound memory: a stack and its products are several copies of it."""
    stacks: dict[tuple[tuple[int, int], torch.device], list[_Matrix]] = {}
    for matrix in matrices:
        stacks.setdefault((matrix.sides, matrix.weight.device), []).append(matrix)
    for (sides, device), stack in stacks.items():
        most = max(1, MAX_CPU_STACK // math.prod(sides)) if device.type == "cpu" else len(stack)
        for start in range(0, len(stack), most):
            yield stack[start : start + most]


def divided(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Which matrices each rank orthogonalizes: the most expensive first, each to the rank with the least work."""
    parts, work = [list[int]() for _ in range(ranks)], [0] * ranks
    for place in sorted(range(len(costs)), key=lambda place: -costs[place]):
        least = work.index(min(work))
        parts[least].append(place)
        work[least] += costs[place]
    return parts


def _views(flat: Tensor, matrices: Sequence[_Matrix]) -> list[Tensor]:
    """A flat buffer as the updates of matrices, transposed where tall."""
    if not matrices:
        return []
    sizes = [m.weight.numel() for m in matrices]
    return [part.view(m.sides) for part, m in zip(flat[: sum(sizes)].split(sizes), matrices, strict=True)]


def _add_updates(matrices: list[_Matrix], x: Tensor, lr: float | Tensor) -> None:
    """Add the stack `x` to the weights; updates of tall matrices are scaled up for the same effect on the output."""
    for tall in (False, True):
        chosen = [(matrix, row) for matrix, row in zip(matrices, x, strict=True) if matrix.tall is tall]
        if not chosen:
            continue
        weights = [matrix.weight for matrix, _ in chosen]
        updates = [row.t() if tall else row for _, row in chosen]
        rows, columns = weights[0].shape
        scale = math.sqrt(max(1.0, rows / columns))
        if isinstance(lr, Tensor):
            torch._foreach_add_(weights, torch._foreach_mul([u.to(weights[0].dtype) for u in updates], -lr * scale))
        else:
            torch._foreach_add_(weights, updates, alpha=-lr * scale)
