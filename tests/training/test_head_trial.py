"""New heads that start from those of the model in the box."""

import dataclasses

import torch
from safetensors.torch import load as tensors_from_bytes

from m1clip.model.heads import Head
from m1clip.model.named import GENERAL, HEADS, boxed_files
from m1clip.model.presets import CLIPConfig, HeadConfig, PretrainedImageConfig, PretrainedTextConfig
from m1clip.training.head_trial import fits_general, general_heads

BOTH_LITE = "efficientnet-lite0+lite2"
SHAPE = CLIPConfig(
    image_tower=PretrainedImageConfig(kind=BOTH_LITE, name=BOTH_LITE, image_size=260),
    text_tower=PretrainedTextConfig(context_length=64),
    image_head=HeadConfig(kind="adapter", hidden=512, dropout=0.5),
    text_head=HeadConfig(kind="adapter", hidden=512, dropout=0.5),
    embed_dim=256,
)


def test_general_heads_compute_the_same_with_a_wider_hidden_layer() -> None:
    saved = tensors_from_bytes(boxed_files(GENERAL)[HEADS])
    wide = general_heads(SHAPE)
    torch.manual_seed(0)
    for side in ("image_head", "text_head"):
        made = []
        for weights in (saved, wide):
            own = {
                name.removeprefix(f"{side}."): tensor.float()
                for name, tensor in weights.items()
                if name.startswith(side)
            }
            hidden, width = own["up.weight"].shape
            head = Head(HeadConfig(kind="adapter", hidden=hidden), width, 256)
            head.load_state_dict(own)
            features = torch.randn(3, width, generator=torch.Generator().manual_seed(1))
            made.append(head.eval()(features))
        torch.testing.assert_close(made[0], made[1], atol=1e-4, rtol=1e-4)


def test_general_heads_fit_only_their_towers() -> None:
    assert fits_general(SHAPE)
    assert not fits_general(dataclasses.replace(SHAPE, embed_dim=128))
    narrow = HeadConfig(kind="adapter", hidden=8)
    assert not fits_general(dataclasses.replace(SHAPE, image_head=narrow))
    lite0 = PretrainedImageConfig(image_size=260)
    assert not fits_general(dataclasses.replace(SHAPE, image_tower=lite0))
