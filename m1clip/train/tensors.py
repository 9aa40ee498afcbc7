"""Which tensors make a checkpoint, and how they are put back. Frozen weights are referred to by their hash."""

from __future__ import annotations

from torch import Tensor, nn

from m1clip.errors import UserError
from m1clip.train.checkpoint import Groups, LoopState
from m1clip.train.update import Update


def groups(update: Update, state: LoopState) -> Groups:
    """All tensors of a checkpoint, by file; the scaler's two numbers go into the state."""
    if update.scaler is not None:
        scaler = update.scaler.state_dict()
        state.scaler_scale, state.scaler_growth = float(scaler["scale"]), int(scaler["_growth_tracker"])
    state.frozen_sha256 = update.frozen_sha256
    kept = {"weights": trained(update.model), "optimizer": update.optimizer.tensors()}
    if update.ema is not None:
        kept["ema"] = {name: t for name, t in update.ema.weights.items() if name in kept["weights"]}
    return kept


def trained(model: nn.Module) -> dict[str, Tensor]:
    """The weights that training may change, and all buffers."""
    frozen = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in frozen}


def restore(update: Update, state: LoopState, kept: Groups) -> None:
    """Put a checkpoint's tensors back; a UserError, before anything is changed, where they are not this model's."""
    wrong = _misfit(update, state, kept)
    if wrong:
        raise UserError(
            f"the checkpoint of step {state.step:,} does not fit the run: {wrong}. Bring an earlier one back from a "
            f"copy, or begin a new run"
        )
    update.forget_graph()
    update.model.load_state_dict(kept["weights"], strict=False)  # without what is frozen
    update.optimizer.load_tensors(kept["optimizer"])
    if update.ema is not None:
        update.ema.weights |= kept["ema"]
    if update.scaler is not None:
        scale = {"scale": state.scaler_scale, "_growth_tracker": state.scaler_growth}
        update.scaler.load_state_dict({**update.scaler.state_dict(), **scale})


def _misfit(update: Update, state: LoopState, kept: Groups) -> str:
    """Which tensor is missing, unknown or of another shape, in words; empty when all fit."""
    if state.frozen_sha256 != update.frozen_sha256:
        return "the frozen weights are not those that it began with"
    own = {name: p.detach() for name, p in update.model.named_parameters() if p.requires_grad}
    wanted: Groups = {"weights": trained(update.model), **({} if update.ema is None else {"ema": own})}
    for group, tensors in wanted.items():
        wrong = _difference(kept.get(group, {}), tensors)
        if wrong:
            return f"{group}: {wrong}"
    moments = kept.get("optimizer", {})
    for part_name in update.optimizer.parts:
        found = [key.split("/") for key in moments if key.startswith(f"{part_name}/")]
        kinds = {words[-1] for words in found}
        for name in {"/".join(words[1:-1]) for words in found}:
            for kind in kinds:
                tensor = moments.get(f"{part_name}/{name}/{kind}")
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
