"""Known errors of torch on Apple GPUs as small reproductions, which must pass on every other
device.
"""

import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from m1clip.errors import first_line

# A reduction beyond the limit; the value in the memory behind the operands.
LONG, POISON = (40_000, 1e4)
REPRODUCTION_SECONDS = 120  # seconds
# Exit code of the process that reproduces an error; 1 would be that of an exception.
WRONG_RESULT_CODE = 3


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def _differs(actual: Tensor, expected: Tensor, tolerance: float = 0.02) -> bool:
    actual, expected = actual.detach().float().cpu(), expected.detach().float().cpu()
    return not bool((actual - expected).norm() <= tolerance * expected.norm())


def _long_product(device: torch.device, reduction: int, batched: bool) -> bool:
    a, b = _random(32, reduction), _random(reduction, 32)
    # The error depends on the memory behind the operands, so large numbers are put there.
    padded = [F.pad(a.flatten(), (0, 4096), value=POISON), F.pad(b, (0, 0, 0, 128), value=POISON)]
    first = padded[0].to(device)[: a.numel()].view_as(a)
    right = padded[1].to(device)[:reduction]
    return _differs(torch.bmm(first[None], right[None])[0] if batched else first @ right, a @ b)


def _causal(device: torch.device) -> bool:
    q, k, v = _random(3, 1, 4, 64, 64).to(device, torch.bfloat16)
    changed = v.clone()
    changed[:, :, 33:] += 1
    with torch.no_grad():
        before, after = (
            F.scaled_dot_product_attention(q, k, x, is_causal=True)[:, :, :33] for x in (v, changed)
        )
    return _differs(after, before, 1e-3)


def _transposed_weight(device: torch.device) -> bool:
    x, weight = (
        _random(2, 256, 256).to(device, torch.bfloat16),
        _random(256, 512).to(device, torch.bfloat16),
    )
    return _differs(F.linear(x, weight.T), x.float().cpu() @ weight.float().cpu())


def _repeated(device: torch.device) -> bool:
    x = _random(2, 13, 1024).to(device, torch.bfloat16).requires_grad_()
    weight = _random(1024, 1024).to(device, torch.bfloat16)
    outputs = [F.linear(x, weight) for _ in range(2)]
    grads = [torch.autograd.grad(F.linear(x, weight), x, outputs[0].detach())[0] for _ in range(2)]
    return any(_differs(first, second, 1e-3) for first, second in (outputs, grads))


def _linear_with_bias(device: torch.device, *shape: int) -> bool:
    x, weight, bias = _random(*shape), _random(192, shape[-1]), _random(192)
    return _differs(
        F.linear(x.to(device), weight.to(device), bias.to(device)), F.linear(x, weight, bias)
    )


class KnownError(NamedTuple):
    """One error: its issue in pytorch/pytorch, how m1clip avoids it, and whether a device
    has it.
    """

    issue: int
    title: str
    avoided: str
    has: Callable[[torch.device], bool]
    aborts: bool = False  # whether the error ends the process


SPLIT = "no call is that long"
KNOWN_ERRORS = (
    KnownError(
        193487, "mm with a reduction of 40,000", SPLIT, lambda d: _long_product(d, LONG, False)
    ),
    KnownError(
        195163, "mm with a reduction of 32,767", SPLIT, lambda d: _long_product(d, 32_767, False)
    ),
    KnownError(
        195163, "bmm with a reduction of 40,000", SPLIT, lambda d: _long_product(d, LONG, True)
    ),
    KnownError(
        195910, "causal attention in bf16 sees later tokens", "bmm attention is used there", _causal
    ),
    KnownError(
        197796,
        "bf16 linear with a transposed weight",
        "weights are contiguous",
        _transposed_weight,
        True,
    ),
    KnownError(
        180776,
        "bf16 linear without bias, 3-D, differs in each call",
        "such inputs are 2-D",
        _repeated,
    ),
    KnownError(
        189495,
        "linear with bias, 65,537 sequences",
        SPLIT,
        lambda d: _linear_with_bias(d, 65_537, 1, 8),
    ),
    KnownError(
        188438,
        "linear with bias, sequences of 1",
        "such inputs are 2-D",
        lambda d: _linear_with_bias(d, 80, 1, 2),
    ),
)


def find_errors(kind: str) -> dict[str, str]:
    """Each known error and what a device did: "" if it computed the right result."""
    outcomes = {}
    for number, error in enumerate(KNOWN_ERRORS):
        name = f"pytorch#{error.issue}, {error.title}"
        if error.aborts and kind == "mps":
            command = [sys.executable, "-m", __name__, kind, str(number)]
            code = subprocess.run(
                command, capture_output=True, check=False, timeout=REPRODUCTION_SECONDS
            ).returncode
            outcomes[name] = {0: "", WRONG_RESULT_CODE: "wrong"}.get(code, "the process ends")
            continue
        try:
            outcomes[name] = "wrong" if error.has(torch.device(kind)) else ""
        except RuntimeError as failure:
            outcomes[name] = first_line(failure)
    return outcomes


if __name__ == "__main__":
    sys.exit(
        WRONG_RESULT_CODE if KNOWN_ERRORS[int(sys.argv[2])].has(torch.device(sys.argv[1])) else 0
    )
