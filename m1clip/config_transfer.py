"""Settings for training on what others have trained. The line under a field is its --help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from cyclopts import Group, Parameter

from m1clip.errors import UserError
from m1clip.plain import check_limits

COMMON = Group("Common", sort_key=0)  # the same as in config.py, which imports this file
MOST_VIEWS = 6


@dataclass(frozen=True, kw_only=True)
class TransferConfig:
    """Where a model starts: from random weights, or on pretrained towers that stand still."""

    recipe: Annotated[
        Literal["scratch", "frozen", "finetune", "auto"], Parameter(alias="--recipe", group=COMMON)
    ] = "scratch"
    "scratch; frozen: pretrained towers, features once, heads trained; finetune: then the towers too; auto: decides."
    image_tower: Annotated[str, Parameter(alias="--image-tower")] = "efficientnet-lite0"
    "frozen: efficientnet-lite0; a vision model of transformers (folder or hub name); timm:NAME; vit: ours, trained."
    text_tower: Annotated[str, Parameter(alias="--text-tower")] = "minilm"
    "frozen: minilm (all-MiniLM-L6-v2); a text model of transformers (folder or hub name); text: ours, trained."
    download: bool = False
    "Fetch a tower that is named and not on this machine from the hub; nothing is ever fetched without this."
    head: Literal["linear", "mlp", "adapter"] = "adapter"
    "frozen: what is trained on each tower: a projection, an MLP, or a projection and a residual MLP beside it."
    hidden: int = 512
    "frozen: hidden width of the head."
    embed_dim: int = 256
    "frozen: length of the vectors that pictures and captions share."
    dropout: float = 0.3
    "frozen: dropout of the head's hidden layer; a third of it on the features."
    image_size: int = 224
    "frozen: pictures are scaled to this square for the tower; a multiple of 32."
    context_length: int = 64
    "frozen: longest caption in tokens."
    views: int = 1
    "frozen: looks at each training picture, mirrored and cropped ones after the first; each takes as long as that."

    init: Annotated[str | None, Parameter(alias="--init", group=COMMON)] = None
    "Fine-tune this model: a run, a model folder, or one of open_clip or Hugging Face."
    activation: Literal["gelu", "quick_gelu"] | None = None
    "init: the activation of open_clip weights that come without a config."
    vocabulary: Literal["keep", "cut"] = "keep"
    "init: keep the model's vocabulary, or cut it to the pieces that the training captions use."
    train_image: int = -1
    "init: blocks of the image tower to train, counted from the last; -1 = all, 0 = none."
    train_text: int = -1
    "init: the same for the text tower. Of a model on frozen towers, a tower with 0 is read from its kept features."
    lora_rank: int = 0
    "init: train only a product of this rank beside each linear layer of the towers; 0 = off."
    lora_alpha: float = 16.0
    "init: weight of that product, over the rank."
    lora_targets: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    "init: only on layers whose name ends so, such as attn.qkv; default: all."
    teacher: Annotated[str | None, Parameter(alias="--teacher")] = None
    "Learn from this model too (any that --init takes): what it thinks of the pairs of a step is a second target."
    teacher_weight: float = 0.5
    "Share of that second target in the loss."

    wise: Annotated[str, Parameter(alias="--wise", group=COMMON)] = "off"
    "init: mix old and new weights at the end: 0.5 takes half of each, search tries a few on validation."
    base: Annotated[tuple[str, ...], Parameter(alias="--base", negative="", group=COMMON)] = ()
    "init: a set that must not be forgotten: its recall (zero-shot top-1 of class folders) at each evaluation."

    def __post_init__(self) -> None:
        check_limits(self, "transfer.")
        if self.wise not in ("off", "search"):
            try:
                fine = 0 <= float(self.wise) <= 1
            except ValueError:
                fine = False
            if not fine:
                raise UserError(f"--wise is off, search, or a number from 0 to 1, not {self.wise}")
        if not 0 < self.teacher_weight <= 1:
            raise UserError(
                f"transfer.teacher_weight must be above 0 and at most 1, not {self.teacher_weight}"
            )
        if self.lora_rank < 0 or min(self.train_image, self.train_text) < -1:
            raise UserError("transfer.lora_rank must be 0 or more, train_image and train_text -1 or more")
        if self.init is not None and self.recipe == "frozen":
            raise UserError(f"--init goes without --recipe {self.recipe}: it is a recipe of its own")
        for name in ("hidden", "embed_dim", "image_size", "context_length"):
            if getattr(self, name) < 1:
                raise UserError(f"transfer.{name} must be at least 1, not {getattr(self, name)}")
        if not 1 <= self.views <= MOST_VIEWS:
            raise UserError(f"transfer.views must lie between 1 and {MOST_VIEWS}, not {self.views}")
        if not 0 <= self.dropout < 1:
            raise UserError(f"transfer.dropout must lie in [0, 1), not {self.dropout}")
