"""Settings for all tests: one torch thread, and the same hypothesis examples each time."""

from __future__ import annotations

import torch
from hypothesis import settings

settings.register_profile("m1clip", derandomize=True, deadline=None, database=None)
settings.load_profile("m1clip")
torch.set_num_threads(1)
