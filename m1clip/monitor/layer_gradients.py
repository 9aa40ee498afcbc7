"""The rule that names vanishing and exploding gradients, from the gradient norm of each layer."""

import math
import re
from collections.abc import Mapping, Sequence

from m1clip.formatting import number
from m1clip.monitor.history import History

# Blocks of a tower have the same shape, so their gradients have similar norms. In healthy runs they
# differ by up to about ten times; a thousand times means that some blocks hardly learn while others
# jump.
MAX_RATIO = 1000.0
BLOCK = re.compile(r"(image|text)/block (\d+)")


Norms = Mapping[str, float | str]  # by layer; "nan" and "inf" as the log writes them


def judge_gradients(values: Sequence[tuple[int, Norms]], history: History) -> list[str]:
    """Judge the newest norms: the rule of `layer_grad_norms` in the table of analyses."""
    _, newest = values[-1]
    return gradient_problems(newest)


def gradient_problems(norms: Norms) -> list[str]:
    """Name the towers whose gradients vanish or explode from block to block.

    [] for a healthy model.
    """
    towers: dict[str, dict[int, float]] = {}
    for layer, norm in norms.items():
        match = BLOCK.fullmatch(layer)
        if match is not None:
            towers.setdefault(match[1], {})[int(match[2])] = float(norm)
    judged = (_judge_tower(tower, blocks) for tower, blocks in towers.items())
    return [problem for problem in judged if problem]


def _judge_tower(tower: str, blocks: Mapping[int, float]) -> str:
    """Judge the norms by block number; 1 is next to the input, so gradients reach it last."""
    not_finite = [block for block, norm in blocks.items() if not math.isfinite(norm)]
    if not_finite:
        return (
            f"the gradients of the {tower} tower explode: not finite in block {max(not_finite)}; "
            f"try a lower --lr or --precision fp32"
        )
    smallest = min(blocks, key=blocks.__getitem__)
    largest = max(blocks, key=blocks.__getitem__)
    if blocks[largest] == 0:
        return f"the gradients of the {tower} tower vanish: they are 0 in every block"
    if blocks[largest] <= MAX_RATIO * blocks[smallest]:
        return ""
    values = (
        f"{number(blocks[smallest])} in block {smallest}, {number(blocks[largest])} in block "
        f"{largest}"
    )
    if smallest < largest:
        return (
            f"the gradients of the {tower} tower vanish towards its input: {values}; its first "
            f"blocks hardly learn: try fewer layers, or begin with a trained model (--init)"
        )
    return (
        f"the gradients of the {tower} tower explode towards its input: {values}; try a lower --lr,"
        " a longer --warmup or fewer layers"
    )
