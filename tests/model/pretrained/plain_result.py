"""Compares the kernels of inference mode with the plain computation."""

import torch
from torch import Tensor, nn


def assert_inference_matches(tower: nn.Module, batch: Tensor) -> None:
    """Check that a tower gives the same features in inference mode, also after its weights change."""
    with torch.no_grad():
        plain = tower.eval()(batch)
    with torch.inference_mode():
        torch.testing.assert_close(tower(batch), plain, atol=1e-4, rtol=1e-4)
        # With the packed weights.
        torch.testing.assert_close(tower(batch), plain, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(tower(batch[:1]), plain[:1], atol=1e-4, rtol=1e-4)
    # Copies of it are not reused.
    for changed in (list(tower.parameters())[-2], list(tower.parameters())[-1]):
        with torch.no_grad():
            changed.mul_(2.0).add_(0.1)
            plain = tower(batch)
        with torch.inference_mode():
            torch.testing.assert_close(tower(batch), plain, atol=1e-4, rtol=1e-4)
