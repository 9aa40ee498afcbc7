"""CLIP's forward pass in MLX: functions of the torch model's parameters, in torch's layout."""

from collections.abc import Callable
from typing import Any, Literal

import mlx.core as mx

from m1clip.model.clip import SHORTEST
from m1clip.model.heads import FEATURE_DROPOUT, LARGEST_FEATURE, dropout_threshold
from m1clip.model.presets import CLIPConfig, HeadConfig
from m1clip.model.towers import stem_groups

Array = Any  # mx.array: the package is an extra, and without types here
Arrays = dict[str, Array]
NORM_EPS = 1e-5  # of torch's norms


def encoder(
    config: CLIPConfig, side: Literal["image", "text"], dtype: Any, checkpointing: bool
) -> Callable[[Arrays, Arrays], Array]:
    """Return the function from all weights and the inputs of one side to unit vectors.

    The vectors are (n, embed_dim) in float32.

    Inputs are `pixels` (n, size, size, 3) with optional `kept` patches, or `tokens`, or the
    `features` of a frozen tower; and the head's dropout masks, where it has any. Towers and heads
    compute in `dtype`. With `checkpointing`, the backward pass recomputes the activations of all
    blocks but the last.
    """
    head: HeadConfig = getattr(config, f"{side}_head")

    def encode(weights: Arrays, inputs: Arrays) -> Array:
        tower = part(weights, f"{side}_tower")
        if "features" in inputs:
            x = inputs["features"]
        elif side == "image":
            x = _vision(
                tower,
                inputs["pixels"].astype(dtype),
                inputs.get("kept"),
                config.image_tower,
                checkpointing,
            )
        else:
            x = _text(tower, inputs["tokens"], config.text_tower, dtype, checkpointing)
        x = _head(part(weights, f"{side}_head"), x, head, inputs, dtype).astype(mx.float32)
        return x * mx.rsqrt(mx.maximum((x * x).sum(axis=-1, keepdims=True), SHORTEST))

    return encode


def part(weights: Arrays, name: str) -> Arrays:
    """Return the weights of one module, by their names within it."""
    return {
        key[len(name) + 1 :]: value for key, value in weights.items() if key.startswith(f"{name}.")
    }


def _matmul(x: Array, weight: Array, bias: Array | None) -> Array:
    y = x @ weight.astype(x.dtype).T
    return y if bias is None else y + bias.astype(x.dtype)


def _linear(w: Arrays, name: str, x: Array) -> Array:
    return _matmul(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def _norm(w: Arrays, name: str, x: Array) -> Array:
    return mx.fast.layer_norm(x, w[f"{name}.weight"], w[f"{name}.bias"], NORM_EPS).astype(x.dtype)


def _group_norm(w: Arrays, name: str, x: Array) -> Array:
    """Normalize groups of channels of (n, height, width, channels), in float32."""
    n, height, width, channels = x.shape
    groups = stem_groups(channels)
    grouped = x.astype(mx.float32).reshape(n, height * width, groups, channels // groups)
    normal = (grouped - grouped.mean((1, 3), keepdims=True)) * mx.rsqrt(
        grouped.var((1, 3), keepdims=True) + NORM_EPS
    )
    return (normal.reshape(x.shape) * w[f"{name}.weight"] + w[f"{name}.bias"]).astype(x.dtype)


def _gelu(x: Array) -> Array:
    return x * (1 + mx.erf(x * 0.5**0.5)) / 2


def _vision(
    w: Arrays, pixels: Array, kept_patches: Array | None, config: Any, checkpointing: bool
) -> Array:
    """(n, size, size, 3) -> (n, width)."""
    n = len(pixels)
    grid = config.grid
    size = config.patch_size
    if config.stem == "conv":
        x = pixels
        last = len(config.stem_channels) - 1
        for number in range(last + 1):
            # torch stores (out, in, height, width)
            weight = w[f"patch.convs.{number}.weight"].astype(x.dtype).transpose(0, 2, 3, 1)
            x = mx.conv2d(x, weight, stride=2, padding=1) + w[f"patch.convs.{number}.bias"].astype(
                x.dtype
            )
            if number < last:
                x = _gelu(_group_norm(w, f"patch.group_norms.{number}", x))
        x = x.reshape(n, grid * grid, -1)
    else:
        x = (
            pixels.reshape(n, grid, size, grid, size, 3)
            .transpose(0, 1, 3, 5, 2, 4)
            .reshape(n, grid * grid, -1)
        )
        x = _matmul(x, w["patch.weight"].reshape(config.width, -1), w.get("patch.bias"))
    positions = w["positions"].astype(x.dtype)
    patch_positions = positions[-grid * grid :]
    if kept_patches is not None:
        x = x[mx.arange(n)[:, None], kept_patches]
        patch_positions = patch_positions[kept_patches]
    x = x + patch_positions
    if "cls" in w:
        first = w["cls"].astype(x.dtype) + positions[0]
        x = mx.concatenate([mx.broadcast_to(first, (n, 1, config.width)), x], axis=1)
    if config.pre_norm:
        x = _norm(w, "norm_pre", x)
    position = mx.zeros((n,), mx.int32) if "cls" in w else None
    return _norm(
        w, "norm", _transformer(part(w, "transformer"), x, config, position, False, checkpointing)
    )


def _text(w: Arrays, tokens: Array, config: Any, dtype: Any, checkpointing: bool) -> Array:
    """(n, length) -> (n, width): the output at the first EOT token.

    With `pooling="eot"` that is all; otherwise the mean of the token embeddings is added.
    """
    embedded = w["tokens.weight"][tokens]
    length = tokens.shape[1]
    x = (embedded + w["positions"][:length]).astype(dtype)
    eot = mx.argmax(tokens == config.eot_id, axis=1)
    x = _norm(w, "norm", _transformer(part(w, "transformer"), x, config, eot, True, checkpointing))
    if config.pooling == "eot":
        return x
    inside = (mx.arange(length) <= eot[:, None])[:, :, None]
    mean = (embedded * inside).sum(axis=1) / (eot + 1)[:, None]
    return x + _norm(w, "norm_mean", mean).astype(x.dtype)


def _transformer(
    w: Arrays, x: Array, config: Any, position: Array | None, causal: bool, checkpointing: bool
) -> Array:
    """(n, length, width) -> (n, width): the output at one position, or the mean over all.

    The last block computes nothing else.
    """

    def block(w: Arrays, x: Array, position: Array | None = None, mean: bool = False) -> Array:
        n, length, width = x.shape
        y = _norm(w, "norm1", x)
        mask = "causal" if causal else None
        queries = y
        if position is not None:
            rows = mx.arange(n)
            x = x[rows, position][:, None]
            queries = y[rows, position][:, None]
            mask = (mx.arange(length) <= position[:, None])[:, None, None] if causal else None
        weight = w["attn.qkv.weight"]
        bias = w["attn.qkv.bias"]

        def heads(z: Array) -> Array:
            return z.reshape(n, -1, config.heads, width // config.heads).transpose(0, 2, 1, 3)

        q = heads(_matmul(queries, weight[:width], bias[:width]))
        k, v = map(heads, mx.split(_matmul(y, weight[width:], bias[width:]), 2, axis=-1))
        attended = mx.fast.scaled_dot_product_attention(
            q, k, v, scale=q.shape[-1] ** -0.5, mask=mask
        )
        x = x + _linear(w, "attn.out", attended.transpose(0, 2, 1, 3).reshape(n, -1, width))
        hidden = _linear(w, "mlp.up", _norm(w, "norm2", x))
        hidden = (
            hidden * mx.sigmoid(1.702 * hidden)
            if config.activation == "quick_gelu"
            else _gelu(hidden)
        )
        if mean:
            x = x.mean(axis=1)
            hidden = hidden.mean(axis=1)
        x = x + _linear(w, "mlp.down", hidden)
        return x if position is None else x[:, 0]

    run = mx.checkpoint(block) if checkpointing else block
    for number in range(config.layers - 1):
        x = run(part(w, f"blocks.{number}"), x)
    return block(part(w, f"blocks.{config.layers - 1}"), x, position, mean=position is None)


def _head(w: Arrays, features: Array, config: HeadConfig, masks: Arrays, dtype: Any) -> Array:
    if config.kind == "projection":
        return _matmul(features.astype(dtype), w["weight"], w.get("bias"))
    x = mx.clip(
        (features.astype(mx.float32) - w["mean"]) * (1 / w["deviation"]),
        -LARGEST_FEATURE,
        LARGEST_FEATURE,
    )
    x = _apply_dropout(x, masks.get("feature_mask"), FEATURE_DROPOUT * config.dropout).astype(dtype)
    hidden = _apply_dropout(_gelu(_linear(w, "up", x)), masks.get("hidden_mask"), config.dropout)
    return _linear(w, "down", hidden) + _linear(w, "project", x)


def _apply_dropout(x: Array, mask: Array | None, p: float) -> Array:
    return x if mask is None else x * mask.astype(x.dtype) * (256 / (256 - dropout_threshold(p)))
