"""Which tensors make a checkpoint, and how they are put back."""

from __future__ import annotations

from torch import Tensor

from m1clip.errors import UserError
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
    """Put a checkpoint's tensors back; a UserError, before anything is changed, where they are not this model's."""
    wrong = _misfit(update, kept)
    if wrong:
        raise UserError(
            f"the checkpoint of step {state.step:,} does not fit the run: {wrong}. Bring an earlier one back from a "
            f"copy, or begin a new run"
        )
    update.forget_graph()
    update.model.load_state_dict(kept["weights"])
    update.optimizer.load_tensors(kept["optimizer"])
    if update.ema is not None:
        update.ema.weights = kept["ema"]
    if update.scaler is not None:
        scale = {"scale": state.scaler_scale, "_growth_tracker": state.scaler_growth}
        update.scaler.load_state_dict({**update.scaler.state_dict(), **scale})


def _misfit(update: Update, kept: Groups) -> str:
    """Which tensor is missing, unknown or of another shape, in words; empty when all fit."""
    own = dict(update.model.named_parameters())
    wanted = {"weights": update.model.state_dict(), **({} if update.ema is None else {"ema": own})}
    for group, tensors in wanted.items():
        wrong = _difference(kept.get(group, {}), tensors)
        if wrong:
            return f"{group}: {wrong}"
    state = kept.get("optimizer", {})
    for part_name in update.optimizer.parts:
        found = [key.split("/") for key in state if key.startswith(f"{part_name}/")]
        kinds = {words[-1] for words in found}
        for name in {"/".join(words[1:-1]) for words in found}:
            for kind in kinds:
                tensor = state.get(f"{part_name}/{name}/{kind}")
                if tensor is None or name not in own or tensor.shape not in (own[name].shape, ()):
                    return f"optimizer: {part_name}/{name}/{kind} is missing or has another shape"
    return ""


def _difference(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> str:
    for name in sorted(found.keys() ^ wanted.keys()):
        return f"{name} is {'missing' if name in wanted else 'unknown'}"
    for name, tensor in wanted.items():
        if found[name].shape != tensor.shape:
            return f"{name} has the shape {tuple(found[name].shape)}, not {tuple(tensor.shape)}"
    return ""
