"""Muon: orthogonalized momentum updates for hidden matrices, like torch.optim.Muon but batched.

Newton-Schulz runs once for all matrices of a shape, as batched products: many small products leave
a CPU half idle (256 x 256 on two cores: 200 GFLOP/s one by one, 380 batched).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from m1clip.training.distributed import Ranks, rows_of_rank
from m1clip.training.skippable import SkippableOptimizer

MUON_EPS = 1e-7
MAX_COLUMNS = 32_766  # in one product: MPS sums longer rows wrong on M1 and M2 (pytorch#195163)
MAX_CPU_STACK = 2**24  # numbers in a batch of matrices: 64 MB of float32
Shape = tuple[int, int]
Quintic = tuple[float, float, float]  # a x + b x^3 + c x^5
# Four minimax quintics for singular values from 0.003 of the largest to 1 (the method of Polar
# Express, 2025), where torch.optim.Muon applies one quintic five times. Values above 1 would
# diverge, so all but the last expect up to 3, then 2% more than the bound.
QUINTICS: tuple[Quintic, ...] = (
    (8.1394889, -22.6643122, 15.8349801),
    (3.9641377, -2.8377142, 0.5158247),
    (3.4368339, -2.4751546, 0.4761603),
    (2.4901159, -1.8342751, 0.4368347),
)


def orthogonalize(x: Tensor) -> Tensor:
    """(k, m, n) with m <= n -> each matrix with its singular values brought close to 1, in the
    dtype of `x`.
    """
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=MUON_EPS)
    gram = _gram(x)
    square = torch.bmm(gram, gram)
    # The fourth root of the sum of s^8 bounds the largest s^2, within a few percent where few
    # values are large.
    bound = torch.linalg.vector_norm(square, dim=(1, 2), keepdim=True).sqrt().clamp(min=MUON_EPS)
    gram, square = gram / bound, square / bound**2
    factor = _quintic_factor(gram, square, QUINTICS[0]) * bound.rsqrt()
    wide = x.shape[2] >= 2 * x.shape[1]
    for number, quintic in enumerate(QUINTICS[1:], start=1):
        if wide and number % 2:
            # Two iterations on the small Gram matrix before using the wide one; more would lose
            # precision in bf16.
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


class Muon(SkippableOptimizer):
    """torch.optim.Muon with Newton-Schulz batched over equal shapes: the same state, names and
    update.

    `dtype` is that of the products (bf16 where it is fast, as in torch, else fp32). Its steps can
    be skipped on the device, and captured (m1clip.optimizers.Part).
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        dtype: torch.dtype = torch.bfloat16,
        ranks: Ranks | None = None,
        full_rows: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """Each of the `ranks` orthogonalizes a part of the matrices.

        `full_rows` has the number of rows of matrices of which each rank has some, by the id of the
        tensor.
        """
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self.dtype = dtype
        self.ranks = ranks
        self.full_rows = full_rows
        if any(p.ndim < 2 for group in self.param_groups for p in group["params"]):
            raise ValueError("Muon takes matrices and convolutions only")

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._step_group(group, params)

    def _step_group(self, group: dict[str, Any], params: list[Tensor]) -> None:
        lr, momentum = group["lr"], group["momentum"]
        skip = self.skip
        grads = [p.grad for p in params if p.grad is not None]
        buffers = [self.moment(p, "momentum_buffer") for p in params]
        self.update_means(buffers, grads, momentum)
        torch._foreach_mul_(params, 1 - self.unless_skipped(lr * group["weight_decay"]))

        # A convolution is a matrix from its receptive field to its output channels.
        weights, grads, buffers = (
            [t.flatten(1) for t in tensors] for tensors in (params, grads, buffers)
        )
        shapes = [
            (self.full_rows.get(id(p), len(p)), w.shape[1])
            for p, w in zip(params, weights, strict=True)
        ]

        def nesterov(indices: Sequence[int]) -> Sequence[Tensor]:
            return torch._foreach_lerp(
                [grads[index] for index in indices], [buffers[index] for index in indices], momentum
            )

        def orthogonal(
            indices: Sequence[int], matrices: Mapping[int, Tensor]
        ) -> Iterator[tuple[list[int], Sequence[Tensor]]]:
            """The updates of some matrices, stack by stack: for all at once, momentum would need
            another gradient.
            """
            for stack in _stacks(indices, shapes, weights):
                x = self._orthogonal(
                    [matrices[index] for index in stack] if matrices else nesterov(stack)
                )
                yield stack, x if skip is None else torch._foreach_mul(x, (1 - skip).to(self.dtype))

        def add(indices: Sequence[int], updates: Sequence[Tensor]) -> None:
            _add_updates(
                [weights[index] for index in indices],
                updates,
                [shapes[index] for index in indices],
                lr,
            )

        ranks = self.ranks
        if ranks is None:
            for stack, updates in orthogonal(range(len(weights)), {}):
                add(stack, updates)
            return
        parts = balance([_cost(shape) for shape in shapes], ranks.size)
        own, matrices = parts[ranks.rank], dict[int, Tensor]()
        if self.full_rows:
            rows = [m.to(self.dtype) for m in nesterov(range(len(weights)))]
            matrices = self._gather_matrices(ranks, rows, parts, shapes)
        updates_by_index = {
            index: x
            for stack, updates in orthogonal(own, matrices)
            for index, x in zip(stack, updates, strict=True)
        }
        if self.full_rows:
            add(range(len(weights)), self._scatter_rows(ranks, updates_by_index, parts, shapes))
            return
        sizes = [sum(math.prod(shapes[index]) for index in part) for part in parts]
        flat = torch.empty(max(sizes), dtype=self.dtype, device=weights[0].device)
        for view, index in zip(_views(flat, [shapes[index] for index in own]), own, strict=True):
            view.copy_(updates_by_index[index])
        for part, received in zip(parts, ranks.gather_views(flat), strict=True):
            add(part, _views(received, [shapes[index] for index in part]))

    def _gather_matrices(
        self, ranks: Ranks, rows: list[Tensor], parts: list[list[int]], shapes: list[Shape]
    ) -> dict[int, Tensor]:
        """The complete matrices that this rank orthogonalizes, from the rows of all ranks."""
        own = parts[ranks.rank]
        held = [
            [_held(shapes[index], rank, ranks.size) for index in own] for rank in range(ranks.size)
        ]
        received = ranks.exchange(
            [_flat([rows[p] for p in part], rows[0]) for part in parts], [*map(_numbers, held)]
        )
        views = [
            _views(flat, shapes_of_rank)
            for flat, shapes_of_rank in zip(received, held, strict=True)
        ]
        return {
            index: torch.cat(rows_of_matrix)
            for index, rows_of_matrix in zip(own, zip(*views, strict=True), strict=True)
        }

    def _scatter_rows(
        self,
        ranks: Ranks,
        updates_by_index: dict[int, Tensor],
        parts: list[list[int]],
        shapes: list[Shape],
    ) -> list[Tensor]:
        """The rows of this rank of the updates of all matrices."""
        sent = []
        for rank in range(ranks.size):
            own_rows = [
                updates_by_index[index][rows_of_rank(shapes[index][0], rank, ranks.size)]
                for index in parts[ranks.rank]
            ]
            sent.append(
                _flat(
                    own_rows, torch.empty(0, dtype=self.dtype, device=next(iter(self.state)).device)
                )
            )
        held = [[_held(shapes[index], ranks.rank, ranks.size) for index in part] for part in parts]
        received = ranks.exchange(sent, [*map(_numbers, held)])
        updates = dict[int, Tensor]()
        for part, flat, shapes_held in zip(parts, received, held, strict=True):
            updates |= zip(part, _views(flat, shapes_held), strict=True)
        return [updates[index] for index in range(len(shapes))]

    def _orthogonal(self, matrices: Sequence[Tensor]) -> list[Tensor]:
        """The updates of matrices with the same two sides."""
        tall = [len(m) > m.shape[1] for m in matrices]
        x = torch.empty(
            (len(matrices), *sorted(matrices[0].shape)), dtype=self.dtype, device=matrices[0].device
        )
        # Cast, and transposed where tall, in one pass.
        torch._foreach_copy_(
            list(x), [m.t() if turned else m for m, turned in zip(matrices, tall, strict=True)]
        )
        return [
            row.t() if turned else row for row, turned in zip(orthogonalize(x), tall, strict=True)
        ]


def _cost(shape: Shape) -> int:
    """Of a product with its transpose, relative to others."""
    return min(shape) ** 2 * max(shape)


def _stacks(
    indices: Sequence[int], shapes: Sequence[Shape], weights: Sequence[Tensor]
) -> Iterator[list[int]]:
    """Matrices of one shape or its transpose.

    Few on the CPU, since a stack and its products are several copies.
    """
    stacks: dict[tuple[int, int, torch.device], list[int]] = {}
    for index in indices:
        stacks.setdefault(
            (min(shapes[index]), max(shapes[index]), weights[index].device), []
        ).append(index)
    for (short, long, device), stack in stacks.items():
        max_stack = max(1, MAX_CPU_STACK // (short * long)) if device.type == "cpu" else len(stack)
        for start in range(0, len(stack), max_stack):
            yield stack[start : start + max_stack]


def balance(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Which matrices each rank orthogonalizes: the most expensive first, each to the rank with the
    least work.
    """
    parts, work = [list[int]() for _ in range(ranks)], [0] * ranks
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        idlest = work.index(min(work))
        parts[idlest].append(index)
        work[idlest] += costs[index]
    return parts


def _held(shape: Shape, rank: int, size: int) -> Shape:
    rows = rows_of_rank(shape[0], rank, size)
    return rows.stop - rows.start, shape[1]


def _numbers(shapes: Sequence[Shape]) -> int:
    return sum(map(math.prod, shapes))


def _flat(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors]) if tensors else like.new_empty(0)


def _views(flat: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    parts = flat[: _numbers(shapes)].split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)] if shapes else []


def _add_updates(
    weights: Sequence[Tensor],
    updates: Sequence[Tensor],
    shapes: Sequence[Shape],
    lr: float | Tensor,
) -> None:
    """Add updates to the weights.

    Those of tall matrices are scaled up for the same effect on the output.
    """
    groups: dict[float, list[int]] = {}
    for index, (rows, columns) in enumerate(shapes):
        groups.setdefault(math.sqrt(max(1.0, rows / columns)), []).append(index)
    for scale, indices in groups.items():
        chosen, added = [weights[index] for index in indices], [updates[index] for index in indices]
        if isinstance(lr, Tensor):
            torch._foreach_add_(
                chosen, torch._foreach_mul([u.to(chosen[0].dtype) for u in added], -lr * scale)
            )
        else:
            torch._foreach_add_(chosen, added, alpha=-lr * scale)
