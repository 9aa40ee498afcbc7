"""The shape of a model on pretrained towers, as plain data for its config.json."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from m1clip.errors import UserError
from m1clip.model.heads import HeadKind
from m1clip.plain import check_limits, checked


@dataclass(frozen=True, kw_only=True)
class TowerShape:
    """Which towers, and the sizes of the heads on them."""

    image_tower: str = "efficientnet-lite0"
    text_tower: str = "minilm"
    image_config: str = ""  # JSON that transformers builds the tower from; empty for ours
    text_config: str = ""
    image_size: int = 224
    context_length: int = 64
    vocab_size: int = 30522
    embed_dim: int = 512
    head: HeadKind = "mlp"
    hidden: int = 1024
    dropout: float = 0.3
    logit_bias: bool = False

    def __post_init__(self) -> None:
        check_limits(self, "model on towers: ")
        for name in ("image_size", "context_length", "vocab_size", "embed_dim", "hidden"):
            if getattr(self, name) < 1:
                raise UserError(f"model on towers: {name} must be at least 1, not {getattr(self, name)}")
        if self.image_size % 32 and not self.image_config:
            raise UserError(
                f"{self.image_tower} takes pictures whose side is a multiple of 32, not {self.image_size}"
            )
        if not 0 <= self.dropout < 1:
            raise UserError(f"model on towers: dropout must lie in [0, 1), not {self.dropout}")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TowerShape:
        """The inverse of `to_dict`."""
        return cls(**checked(cls, values, "model on towers"))
