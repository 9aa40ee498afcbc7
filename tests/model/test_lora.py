"""LoRA: starts from the weight, changes only its matrices, and is merged."""

import pytest
import torch
from tiny_model import tiny_clip
from torch import nn

from m1clip.errors import UserError
from m1clip.model.clip import CLIP
from m1clip.model.lora import add_head_lora, add_lora, has_lora, merged_state
from m1clip.model.pretrained.efficientnet import EfficientNetLite


def lora_clip(image: int = -1, text: int = -1, rank: int = 2) -> CLIP:
    model = tiny_clip()
    add_lora(model.image_tower, image, rank, "--unfreeze-image")
    add_lora(model.text_tower, text, rank, "--unfreeze-text")
    add_head_lora(model.image_head, rank)
    add_head_lora(model.text_head, rank)
    return model


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(3, 3, 32, 32), torch.tensor([[1, 5, 7, 19], [1, 4, 19, 0], [2, 3, 4, 19]])


def trained(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


def randomize(model: nn.Module) -> None:
    torch.manual_seed(2)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(".up"):
                p.normal_(std=0.1)


def test_lora_starts_from_the_weights() -> None:
    plain, model = tiny_clip(), lora_clip()
    for one, other in zip(plain(*inputs())[:2], model(*inputs())[:2], strict=True):
        assert torch.equal(one, other)
    assert has_lora(model)
    assert not has_lora(plain)


def test_only_thin_matrices_and_the_temperature_are_trained() -> None:
    names = trained(lora_clip())
    assert {name.rpartition(".")[2] for name in names} == {"up", "down", "logit_scale"}
    blocks, matrices = 2, 4  # of a tower and of a block: qkv, out, up, down
    assert len(names) == 2 * (2 * blocks * matrices + 2) + 1


def test_last_blocks_of_one_tower() -> None:
    names = trained(lora_clip(image=1, text=0))
    towers = {".".join(name.split(".")[:4]) for name in names if "_tower" in name}
    assert towers == {"image_tower.transformer.blocks.1"}


def test_merged_weights_are_those_of_a_plain_model() -> None:
    model, plain = lora_clip(), tiny_clip()
    randomize(model)
    plain.load_state_dict(merged_state(model))
    assert not torch.equal(plain.state_dict()["text_head.weight"], tiny_clip().text_head.weight)
    for one, other in zip(plain(*inputs())[:2], model(*inputs())[:2], strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_activation_checkpointing_gives_the_same_gradient(precision: torch.dtype) -> None:
    gradients = []
    for checkpointing in (False, True):
        model = lora_clip()
        randomize(model)
        model.set_activation_checkpointing(checkpointing)
        with torch.autocast("cpu", dtype=precision, enabled=precision != torch.float32):
            image, text, *_ = model(*inputs())
        (image @ text.T).trace().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
        assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    for name, gradient in gradients[0].items():
        other = gradients[1][name]
        assert gradient is None or torch.equal(gradient, other), name
    assert (
        float(
            gradients[0]["image_tower.transformer.blocks.0.attn.qkv.parametrizations.weight.0.up"]
            .abs()
            .max()
        )
        > 0
    )


def test_matrices_of_multihead_attention() -> None:
    torch.manual_seed(0)
    tower = nn.Sequential(nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)]))
    add_lora(tower, -1, 2, "--unfreeze-image")
    names = {name for name in trained(tower) if "in_proj_weight" in name}
    assert names == {
        f"0.0.self_attn.parametrizations.in_proj_weight.0.{part}" for part in ("up", "down")
    }


@pytest.mark.parametrize(
    ("count", "rank", "words"),
    [
        (3, 2, "--unfreeze-image 3: the tower has 2 blocks"),
        (-1, 33, "--lora 33: the smallest matrix of the tower has rank 32"),
    ],
)
def test_impossible_lora(count: int, rank: int, words: str) -> None:
    with pytest.raises(UserError, match=words):
        add_lora(tiny_clip().image_tower, count, rank, "--unfreeze-image")


def test_tower_without_linear_layers() -> None:
    with torch.device("meta"):
        tower = EfficientNetLite()
    with pytest.raises(UserError, match=r"no linear layers.*--unfreeze-image 0") as raised:
        add_lora(tower, -1, 8, "--unfreeze-image")
    assert "\n" not in str(raised.value)
