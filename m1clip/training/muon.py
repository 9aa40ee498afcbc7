"""Muon: momentum, made orthogonal, as the step of a hidden matrix. The rule of torch.optim.Muon, in batches.

Newton-Schulz runs once for all matrices of a shape, as stacked products: many small products leave a processor
half idle (256 x 256 on two cores: 200 GFLOP/s one by one, 380 stacked).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

if TYPE_CHECKING:
    # To a reader of types they are torch's own.
    Lean = Optimizer
    AdamW = torch.optim.AdamW
else:

    class Lean(Optimizer):
        """An optimizer whose methods are torch's own, less the wrappers that keep the compiler out of them."""

        add_param_group = inspect.unwrap(Optimizer.add_param_group)
        zero_grad = inspect.unwrap(Optimizer.zero_grad)
        state_dict = inspect.unwrap(Optimizer.state_dict)
        load_state_dict = inspect.unwrap(Optimizer.load_state_dict)

    class AdamW(Lean, torch.optim.AdamW):
        """torch.optim.AdamW, the same step."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            """Move every parameter that has a gradient."""
            return inspect.unwrap(torch.optim.AdamW.step)(self, closure)


EPS = 1e-7
CPU_STACK = 2**24  # numbers in a stack: 64 MB of float32
Quintic = tuple[float, float, float]  # a x + b x^3 + c x^5
# Five times the same quintic takes singular values from about 0.003 to 1 near 1 (Keller Jordan, 2024).
JORDAN: tuple[Quintic, ...] = ((3.4445, -4.7750, 2.0315),) * 5


# Four minimax quintics for singular values from 0.003 of the largest to 1 (the method of Polar Express, 2025). Values
# above 1 would be thrown far off, so all but the last expect up to 3, then 2% more than the bound.
FOUR: tuple[Quintic, ...] = (
    (8.1394889, -22.6643122, 15.8349801),
    (3.9641377, -2.8377142, 0.5158247),
    (3.4368339, -2.4751546, 0.4761603),
    (2.4901159, -1.8342751, 0.4368347),
)


def orthogonalise(x: Tensor, quick: bool = False) -> Tensor:
    """(k, m, n) with m <= n -> each matrix with its singular values brought near 1, in the dtype of `x`.

    `quick` takes four iterations instead of five and fewer products in each, for an equally good result
    (docs/speed.md): values are scaled by a closer bound of the largest one.
    """
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=EPS)
    if quick:
        return _four(x)
    for a, b, c in JORDAN:
        gram = torch.bmm(x, x.transpose(1, 2))
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def _four(x: Tensor) -> Tensor:
    gram = torch.bmm(x, x.transpose(1, 2))
    square = torch.bmm(gram, gram)
    # The fourth root of the sum of s^8 bounds the largest s^2, by a few percent where few values are large.
    bound = torch.linalg.vector_norm(square, dim=(1, 2), keepdim=True).sqrt().clamp(min=EPS)
    gram, square = gram / bound, square / bound**2
    factor = _factor(gram, square, FOUR[0]) * bound.rsqrt()
    wide = x.shape[2] >= 2 * x.shape[1]
    for number, quintic in enumerate(FOUR[1:], start=1):
        if wide and number % 2:
            # Two iterations on the small Gram matrix before the wide one is touched; more would lose bf16's digits.
            gram = torch.bmm(torch.bmm(factor, gram), factor) * (bound if number == 1 else 1)
            factor = torch.bmm(_factor(gram, torch.bmm(gram, gram), quintic), factor)
            continue
        x = torch.bmm(factor, x)
        gram = torch.bmm(x, x.transpose(1, 2))
        factor = _factor(gram, torch.bmm(gram, gram), quintic)
    return torch.bmm(factor, x)


def _factor(gram: Tensor, square: Tensor, quintic: Quintic) -> Tensor:
    """What a matrix is multiplied by in an iteration: a + b gram + c gram^2."""
    a, b, c = quintic
    factor = torch.add(b * gram, square, alpha=c)
    factor.diagonal(dim1=1, dim2=2).add_(a)
    return factor


class _Piece(NamedTuple):
    """A matrix to move, its gradient, and the momentum that says where to."""

    target: Tensor
    grad: Tensor
    buffer: Tensor

    @property
    def tall(self) -> bool:
        return self.target.shape[0] > self.target.shape[1]

    @property
    def sides(self) -> tuple[int, int]:
        rows, columns = self.target.shape
        return min(rows, columns), max(rows, columns)


class Muon(Lean):
    """torch.optim.Muon with Newton-Schulz batched over equal shapes: the same state, names and update.

    `dtype` is that of the products (bf16 where it is fast, as in torch, else fp32). `parts` says of how many
    matrices, one below the other, a parameter consists: 3 for a fused QKV that is to be made orthogonal apart.
    `quick` is that of `orthogonalise`.
    The rate may be a tensor on the device, so that a captured step can be replayed with another rate.
    A `found_inf` of 1 on the device skips the step there, as it does in torch's fused optimizers; gradients are 0 then.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        dtype: torch.dtype = torch.bfloat16,
        parts: Callable[[str], int] = lambda name: 1,
        quick: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self.dtype, self.parts, self.quick = dtype, parts, quick
        for group in self.param_groups:
            if any(p.ndim < 2 for p in group["params"]):
                raise ValueError("Muon moves matrices, and convolutions as the matrices that they are")

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move every matrix that has a gradient."""
        for group in self.param_groups:
            names = group.get("param_names") or [""] * len(group["params"])
            live = [(n, p) for n, p in zip(names, group["params"], strict=True) if p.grad is not None]
            if live:
                self._move(group, live)

    def _move(self, group: dict[str, Any], live: list[tuple[str, Tensor]]) -> None:
        lr, momentum = group["lr"], group["momentum"]
        skip: Tensor | None = getattr(self, "found_inf", None)
        params = [p for _, p in live]
        grads = [p.grad for p in params if p.grad is not None]
        buffers = [self._buffer(p) for p in params]
        if skip is None:
            torch._foreach_lerp_(buffers, grads, 1 - momentum)
        else:
            # The same, with a weight that is 0 on the device where the step is to be skipped; gradients are 0 there.
            torch._foreach_mul_(buffers, 1 - (1 - momentum) * (1 - skip))
            torch._foreach_add_(buffers, grads, alpha=1 - momentum)
        decay = lr * group["weight_decay"]
        torch._foreach_mul_(params, 1 - decay if skip is None else 1 - decay * (1 - skip))

        stacks: _Stacks = {}
        for (name, p), *other in zip(live, grads, buffers, strict=True):
            count = self.parts(name)
            # A convolution is a matrix from all that a position sees to its channels.
            for piece in map(_Piece, *(tensor.flatten(1).chunk(count) for tensor in (p, *other))):
                stacks.setdefault((piece.sides, p.device), []).append(piece)
        for sides, pieces in _bounded(stacks):
            x = torch.empty((len(pieces), *sides), dtype=self.dtype, device=pieces[0].target.device)
            # Nesterov's look ahead, for the matrices of one shape at a time: for all it would be one more gradient.
            ahead = torch._foreach_lerp([p.grad for p in pieces], [p.buffer for p in pieces], momentum)
            # Cast, and turned where it is tall, in one pass.
            torch._foreach_copy_(list(x), [u.t() if p.tall else u for p, u in zip(pieces, ahead, strict=True)])
            del ahead
            x = orthogonalise(x, self.quick)
            _add(pieces, x if skip is None else x * (1 - skip).to(x.dtype), lr)

    def _buffer(self, p: Tensor) -> Tensor:
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        return state["momentum_buffer"]


_Stacks = dict[tuple[tuple[int, int], torch.device], list[_Piece]]


def _bounded(stacks: _Stacks) -> Iterator[tuple[tuple[int, int], list[_Piece]]]:
    """The stacks, on the CPU in parts of bounded size: a stack and its products are several copies of its matrices."""
    for (sides, device), pieces in stacks.items():
        most = max(1, CPU_STACK // math.prod(sides)) if device.type == "cpu" else len(pieces)
        for at in range(0, len(pieces), most):
            yield sides, pieces[at : at + most]


def _add(pieces: list[_Piece], x: Tensor, lr: float | Tensor) -> None:
    """Move the matrices along the stack `x`; a tall one further, so that all have the same effect on their output."""
    for tall in (False, True):
        chosen = [(piece, row) for piece, row in zip(pieces, x, strict=True) if piece.tall is tall]
        if not chosen:
            continue
        targets = [piece.target for piece, _ in chosen]
        steps = [row.t() if tall else row for _, row in chosen]
        rows, columns = targets[0].shape
        far = math.sqrt(max(1.0, rows / columns))
        if isinstance(lr, Tensor):
            torch._foreach_add_(targets, torch._foreach_mul([s.to(targets[0].dtype) for s in steps], -lr * far))
        else:
            torch._foreach_add_(targets, steps, alpha=-lr * far)
