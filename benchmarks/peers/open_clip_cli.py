"""open_clip's own training command, with one more model config. Runs in a Python that has open_clip.

python open_clip_cli.py CONFIG_FOLDER [arguments of open_clip_train.main]
"""

from __future__ import annotations

import sys

import torchvision_ops  # noqa: F401  first: open_clip imports torchvision

# isort: split
import open_clip
from open_clip_train.main import main

if __name__ == "__main__":
    open_clip.add_model_config(sys.argv[1])
    main(sys.argv[2:])
