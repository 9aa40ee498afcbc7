"""open_clip's own training command for the tests of tests/reliability/peers.py: CONFIG_FOLDER NAN_AT [arguments].

NAN_AT > 0: the images of that training step (counted from 1) are NaN, as a broken decoder might give them.
"""

from __future__ import annotations

import sys
from typing import Any

import torchvision_ops  # noqa: F401  first: open_clip imports torchvision

# isort: split
import open_clip
from open_clip_train.main import main


def poison(step: int) -> None:
    """Make the images of one training step NaN."""
    usual, calls = open_clip.CLIP.encode_image, 0

    def encode_image(self: Any, image: Any, *rest: Any, **named: Any) -> Any:
        nonlocal calls
        calls += self.training
        return usual(self, image * float("nan") if self.training and calls == step else image, *rest, **named)

    open_clip.CLIP.encode_image = encode_image


if __name__ == "__main__":
    open_clip.add_model_config(sys.argv[1])
    if int(sys.argv[2]) > 0:
        poison(int(sys.argv[2]))
    main(sys.argv[3:])
