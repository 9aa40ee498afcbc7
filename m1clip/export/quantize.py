"""ONNX graphs in int8 or fp16: weights of a quarter or half the size; layers that int8 would harm stay in float."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np

from m1clip.export import Precision
from m1clip.inference.onnx import SETTINGS, OnnxModel, read_settings
from m1clip.io import write_json

CALIBRATION_IMAGES = 64
TRIED = 16  # images, and 64 texts, to find the layers that int8 harms
BATCH = 8
BLOCKS = {"image": 8, "text": 32}  # of consecutive layers, tried one by one
# Mean cosine with the float vectors at which no further block stays in float.
ENOUGH_COSINE = 0.995
LAYERS = ("Conv", "MatMul", "Gemm")
# Bounds of the activations: without them the range before ReLU6, most of which is cut off, would be quantized.
BOUNDS = ("Clip", "Relu")
Say = Callable[[str], None]


def quantize(
    folder: Path,
    precision: Precision,
    model: OnnxModel,
    pixels: np.ndarray,
    texts: Sequence[str],
    say: Say,
    ending: str = "",
) -> list[str]:
    """Replace the graphs of a folder, of which `model` is the float version; returns notes.

    `pixels` and `texts` calibrate int8. `ending` is added to the names of the graphs.
    """
    settings, notes = read_settings(folder), []
    inputs = {"image": model.graph_input(pixels), "text": _token_ids(model, texts)}
    for name, convert in (("image", _int8_image), ("text", _int8_text)):
        path = folder / settings[f"{name}_graph"]
        say(f"converting {path.name} to {precision}")
        with _quiet():
            kept = _to_fp16(path) if precision == "fp16" else convert(path, inputs[name], say)
        if kept:
            notes.append(f"{len(kept)} layers of {path.name} stay in float ({kept[0]}, ...)")
        renamed = path.rename(path.with_stem(path.stem + ending))
        settings[f"{name}_graph"] = renamed.relative_to(folder).as_posix()
    write_json(folder / SETTINGS, settings)
    return notes


def _token_ids(model: OnnxModel, texts: Sequence[str]) -> np.ndarray:
    tokens = model.tokenizer.tokenize(texts, model.context_length)
    return tokens[:, : int(model.tokenizer.lengths(tokens).max(initial=2))]


def _vectors(path: Path, inputs: np.ndarray) -> np.ndarray:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    given = session.get_inputs()[0]
    kind = {"tensor(int64)": np.int64, "tensor(int32)": np.int32}.get(given.type, inputs.dtype)
    return np.asarray(session.run(None, {given.name: inputs.astype(kind)})[0])


def _float_layers(graph: Any, name: str, cosine: Callable[[list[str]], float], say: Say) -> list[str]:
    """The layers to keep in float: blocks in the order of what each alone gains, until the cosine is enough."""
    kept: list[str] = []
    reached = cosine(kept)
    if reached >= ENOUGH_COSINE:
        return kept
    weights = {each.name for each in graph.initializer}
    layers = [node.name for node in graph.node if node.op_type in LAYERS and weights & set(node.input)]
    size = -(-len(layers) // BLOCKS[name])
    parts = [layers[at : at + size] for at in range(0, len(layers), size)]
    say(f"trying     {len(parts)} blocks of layers in float: all in int8 give a mean cosine of {reached:.4f}")
    alone = [cosine(part) for part in parts]
    for number in np.argsort(alone)[::-1]:
        kept += parts[number]
        if cosine(kept) >= ENOUGH_COSINE:
            break
    return kept


def _to_fp16(path: Path) -> list[str]:
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16

    onnx.save(convert_float_to_float16(onnx.load(str(path)), keep_io_types=True), str(path))
    return []


def _graph(path: Path) -> Any:
    """The graph without torch's notes on shapes, of which some are wrong after its optimizations."""
    import onnx

    model = onnx.load(str(path))
    del model.graph.value_info[:]
    return model


def _int8_text(path: Path, tokens: np.ndarray, say: Say) -> list[str]:
    """Weights in int8, activations scaled by what each batch contains; returns the layers kept in float."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    source, wanted = _graph(path), _vectors(path, tokens)

    def cosine(kept: list[str]) -> float:
        """Write the graph with these layers in float; its mean cosine with the float vectors."""
        # The library replaces Gemm by MatMul and Add first.
        excluded = [*kept, *(f"{name}_MatMul" for name in kept)]
        quantize_dynamic(
            deepcopy(source), path, per_channel=True, weight_type=QuantType.QInt8, nodes_to_exclude=excluded
        )
        return float((_vectors(path, tokens) * wanted).sum(axis=1).mean())

    return _float_layers(source.graph, "text", cosine, say)


def _int8_image(path: Path, inputs: np.ndarray, say: Say) -> list[str]:
    """Weights and activations in int8, with ranges from the calibration images; returns the layers kept in float."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    source, ranges = _graph(path), path.with_name("ranges.json")
    name, tried = source.graph.input[0].name, inputs[:TRIED]
    wanted = _vectors(path, tried)

    class Reader(CalibrationDataReader):
        """The calibration images in batches."""

        def __init__(self) -> None:
            self.batches = iter(np.array_split(inputs, -(-len(inputs) // BATCH)))

        def get_next(self) -> dict[str, np.ndarray] | None:
            batch = next(self.batches, None)
            return None if batch is None else {name: batch}

    def cosine(kept: list[str]) -> float:
        """Write the graph with these layers in float; its mean cosine with the float vectors."""
        quantize_static(
            deepcopy(source),
            path,
            Reader(),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=[*LAYERS, *BOUNDS],
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            nodes_to_exclude=kept,
            calibration_cache_path=ranges,
            extra_options={"MatMulConstBOnly": True},  # products of two activations have no weights to shrink
        )
        return float((_vectors(path, tried) * wanted).sum(axis=1).mean())

    kept = _float_layers(source.graph, "image", cosine, say)
    ranges.unlink(missing_ok=True)
    return kept


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the library's advice on the root logger."""
    level = logging.root.level
    logging.root.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logging.root.setLevel(level)
