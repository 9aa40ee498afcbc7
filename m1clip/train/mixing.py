"""After fine-tuning: the mix of old and new weights (WiSE-FT), and what was kept of what the model could do before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from m1clip.evaluate.bundle import load
from m1clip.train.forgetting import Base, RecallMeter
from m1clip.train.setup import Job

GRID = (0.0, 0.25, 0.5, 0.75, 1.0)  # shares of the new weights that `--wise search` tries


def mixed(old: dict[str, Tensor], new: dict[str, Tensor], share: float) -> dict[str, Tensor]:
    """WiSE-FT: each weight on the line from the old (0) to the new (1)."""
    return {
        name: old[name].to(tensor).lerp(tensor, share) if tensor.is_floating_point() else tensor
        for name, tensor in new.items()
    }


def mix(
    job: Job, start: dict[str, Tensor], base: Base | None, folder: Path, say: Callable[[str], None],
    write: Callable[..., Any],
) -> None:  # fmt: skip
    """Mix old and new weights as asked, keep what is best on validation, and tell what was forgotten."""
    best, wish = load(folder, device=job.device.kind), job.config.transfer.wise
    new = {name: tensor.clone() for name, tensor in best.model.state_dict().items()}
    tried = GRID if wish == "search" else (1.0,) if wish == "off" else (float(wish),)
    meter = RecallMeter(job.splits["val"], job.autocast) if "val" in job.splits else None
    found: list[tuple[float, float]] = []
    for share in tried:
        best.model.load_state_dict(mixed(start, new, share))
        own = meter(best) if meter is not None and wish != "off" else 0.0
        found.append((own, share))
        if wish != "off":
            write("wise", share=share, **({f"val_{meter.metric}": own} if meter is not None else {}))
    own, share = max(found)
    best.model.load_state_dict(mixed(start, new, share))
    if wish != "off":
        parts = f"{share:.2f} of the new weights, {1 - share:.2f} of the old"
        score = f": validation {meter.name} {100 * own:.1f}%" if meter is not None else ""
        say(f"wise       {parts}{score}")
        best.save(folder / "best")
    if base is not None:
        after = base.meter(best)
        write("forgetting", before=base.before, after=after, metric=base.meter.name)
        say(f"forgetting {base.meter.name} on {base.where}: {base.before:.1%} before, {after:.1%} after")
