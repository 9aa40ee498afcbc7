"""Which tensors make a checkpoint, and how they are put back."""

from __future__ import annotations

from m1clip.train.checkpoint import Groups, LoopState
from m1clip.train.update import Update


def groups(update: Update, state: LoopState) -> Groups:
    """All tensors of a checkpoint, by file; the scaler's two numbers go into the state."""
    if update.scaler is not None:
        scaler = update.scaler.state_dict()
        state.scaler_scale, state.scaler_growth = float(scaler["scale"]), int(scaler["_growth_tracker"])
    kept = {"weights": update.model.state_dict(), "optimizer": update.optimizer.tensors()}
    if update.ema is not None:
        kept["ema"] = update.ema.weights
    return kept


def restore(update: Update, state: LoopState, kept: Groups) -> None:
    """Put a checkpoint's tensors back."""
    update.model.load_state_dict(kept["weights"])
    update.optimizer.load_tensors(kept["optimizer"])
    if update.ema is not None:
        update.ema.weights = kept["ema"]
    if update.scaler is not None:
        scale = {"scale": state.scaler_scale, "_growth_tracker": state.scaler_growth}
        update.scaler.load_state_dict({**update.scaler.state_dict(), **scale})
