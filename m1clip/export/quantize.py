"""ONNX graphs in int8 or fp16: weights of a quarter or half the size; layers that int8 would harm stay in float."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np

from m1clip.export import Precision
from m1clip.inference.onnx import SETTINGS, OnnxModel, read_settings
from m1clip.io import write_json

CALIBRATION_IMAGES = 64
TRIED = 32  # of them, to find the layers that int8 harms
BATCH = 8
BLOCK_LAYERS = 6  # consecutive layers that are tried in float together
# Mean cosine with the float vectors at which no further block stays in float.
ENOUGH_COSINE = 0.998
TEXT_BLOCK = 128  # weights, and activations, with one scale
LAYERS = ("Conv", "MatMul", "Gemm")
# Quantized together with the layer before them: the range before ReLU6 is much larger, and most of it is cut off.
BOUNDS = ("Clip", "Relu")
Say = Callable[[str], None]


def quantize(
    folder: Path, precision: Precision, model: OnnxModel, pixels: np.ndarray, say: Say, ending: str = ""
) -> list[str]:
    """Convert the graphs of a folder in place; `model` is their float version. Returns notes for the user.

    `pixels` calibrate int8. `ending` is added to the names of the graphs.
    """
    settings, notes = read_settings(folder), []
    for name in ("image", "text"):
        path = folder / settings[f"{name}_graph"]
        say(f"converting {path.name} to {precision}")
        with _quiet():
            if precision == "fp16":
                _to_fp16(path)
            elif name == "text":
                _int8_text(path)
            elif kept := _int8_image(path, model.graph_input(pixels), say):
                notes.append(f"{len(kept)} layers of {path.name} stay in float ({kept[0]}, ...)")
        renamed = path.rename(path.with_stem(path.stem + ending))
        settings[f"{name}_graph"] = renamed.relative_to(folder).as_posix()
    write_json(folder / SETTINGS, settings)
    return notes


def _vectors(path: Path, inputs: np.ndarray) -> np.ndarray:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {session.get_inputs()[0].name: inputs})[0])


def _float_layers(graph: Any, cosine: Callable[[list[str]], float], say: Say) -> list[str]:
    """The layers to keep in float: blocks in the order of the gain of each alone, until the cosine is high enough."""
    kept: list[str] = []
    reached = cosine(kept)
    if reached >= ENOUGH_COSINE:
        return kept
    weights = {each.name for each in graph.initializer}
    layers = [node.name for node in graph.node if node.op_type in LAYERS and weights & set(node.input)]
    parts = [layers[at : at + BLOCK_LAYERS] for at in range(0, len(layers), BLOCK_LAYERS)]
    say(f"trying     {len(parts)} blocks of layers in float: all in int8 give a mean cosine of {reached:.4f}")
    alone = [cosine(part) for part in parts]
    for number in np.argsort(alone)[::-1]:
        kept += parts[number]
        if cosine(kept) >= ENOUGH_COSINE:
            break
    return kept


def _to_fp16(path: Path) -> None:
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16

    onnx.save(convert_float_to_float16(onnx.load(str(path)), keep_io_types=True), str(path))


def _graph(path: Path) -> Any:
    """The graph without torch's annotations of shapes, some of which are wrong after its optimizations."""
    import onnx

    model = onnx.load(str(path))
    del model.graph.value_info[:]
    return model


def _int8_text(path: Path) -> None:
    """Weights in int8 with one scale per block; onnxruntime also quantizes the activations of each token in blocks.

    With one scale for all activations of a batch, a few large ones would leave little of the range for the others.
    """
    import onnx
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
    from onnxruntime.quantization.onnx_model import ONNXModel

    source = ONNXModel(_graph(path))
    source.replace_gemm_with_matmul()
    compute_int8 = 4
    quantizer = MatMulNBitsQuantizer(
        source.model, bits=8, block_size=TEXT_BLOCK, is_symmetric=True, accuracy_level=compute_int8
    )
    quantizer.process()
    _int8_embeddings(quantizer.model.model.graph)
    onnx.save(quantizer.model.model, str(path))


def _int8_embeddings(graph: Any) -> None:
    """Store embedding tables in int8, with one scale per row."""
    from onnx import TensorProto, helper, numpy_helper

    tables = {each.name: each for each in graph.initializer if each.data_type == TensorProto.FLOAT}
    for place, node in reversed(list(enumerate(graph.node))):
        if node.op_type != "Gather" or node.input[0] not in tables or len(tables[node.input[0]].dims) != 2:
            continue
        name, ids = node.input
        values = numpy_helper.to_array(tables[name])
        scale = np.maximum(np.abs(values).max(axis=1, keepdims=True) / 127, 1e-12).astype(np.float32)
        rows, scales, real = (f"{name}_{part}" for part in ("rows", "scales", "float"))
        steps = (
            helper.make_node("Gather", [name, ids], [rows]),
            helper.make_node("Cast", [rows], [real], to=TensorProto.FLOAT),
            helper.make_node("Gather", [f"{name}_scale", ids], [scales]),
            helper.make_node("Mul", [real, scales], list(node.output)),
        )
        tables[name].CopyFrom(numpy_helper.from_array(np.round(values / scale).astype(np.int8), name))
        graph.initializer.append(numpy_helper.from_array(scale, f"{name}_scale"))
        graph.node.remove(node)
        for offset, step in enumerate(steps):
            graph.node.insert(place + offset, step)


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

    every = _vectors(path, inputs)
    kept = _float_layers(source.graph, cosine, say)
    ranges.unlink(missing_ok=True)
    _shift(path, (every - _vectors(path, inputs)).mean(axis=0))
    return kept


def _shift(path: Path, offset: np.ndarray) -> None:
    """Add `offset`, the mean error of int8 in the vectors, and normalize the result."""
    import onnx
    from onnx import helper, numpy_helper

    model = onnx.load(str(path))
    graph, name = model.graph, model.graph.output[0].name
    for node in graph.node:
        node.output[:] = [f"{each}_int8" if each == name else each for each in node.output]
    graph.initializer.append(numpy_helper.from_array(offset, f"{name}_offset"))
    graph.node.append(helper.make_node("Add", [f"{name}_int8", f"{name}_offset"], [f"{name}_shifted"]))
    graph.node.append(helper.make_node("LpNormalization", [f"{name}_shifted"], [name], axis=-1, p=2))
    onnx.save(model, str(path))


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence what onnxruntime writes to the root logger."""
    level = logging.root.level
    logging.root.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logging.root.setLevel(level)
