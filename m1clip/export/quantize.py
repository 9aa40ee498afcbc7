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
TRIED_IMAGES = 16  # of them, to find the layers that int8 harms
BATCH = 8
BLOCKS = 8  # of consecutive layers, tried one by one
# Mean cosine with the float vectors at which no further block stays in float.
ENOUGH_COSINE = 0.995
LAYERS = ("Conv", "MatMul", "Gemm")
# Bounds of the activations: without them the range before ReLU6, most of which is cut off, would be quantized.
BOUNDS = ("Clip", "Relu")


def quantize(
    folder: Path,
    precision: Precision,
    model: OnnxModel,
    pixels: np.ndarray,
    say: Callable[[str], None],
    ending: str = "",
) -> list[str]:
    """Replace the graphs of a folder; `model` is the folder in float, `pixels` calibrate it. Returns notes.

    `ending` is added to the names of the graphs.
    """
    settings = read_settings(folder)
    image, text = folder / settings["image_graph"], folder / settings["text_graph"]
    say(f"converting {image.name} and {text.name} to {precision}")
    kept: list[str] = []
    with _quiet():
        if precision == "fp16":
            _to_fp16(image)
            _to_fp16(text)
        else:
            _int8_text(text)
            kept = _int8_image(image, model.graph_input(pixels), say)
    if ending:
        for key, path in (("image_graph", image), ("text_graph", text)):
            renamed = path.rename(path.with_stem(path.stem + ending))
            settings[key] = renamed.relative_to(folder).as_posix()
        write_json(folder / SETTINGS, settings)
    return [f"{len(kept)} layers of {image.name} stay in float: {kept[0]} to {kept[-1]}"] if kept else []


def _to_fp16(path: Path) -> None:
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16

    onnx.save(convert_float_to_float16(onnx.load(str(path)), keep_io_types=True), str(path))


def _graph(path: Path) -> Any:
    """The graph without torch's notes on shapes, of which some are wrong after its optimizations."""
    import onnx

    model = onnx.load(str(path))
    del model.graph.value_info[:]
    return model


def _int8_text(path: Path) -> None:
    """Weights in int8, activations scaled by what each batch contains."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(_graph(path), path, per_channel=True, weight_type=QuantType.QInt8)


def _int8_image(path: Path, inputs: np.ndarray, say: Callable[[str], None]) -> list[str]:
    """Weights and activations in int8, with ranges from the calibration images; returns the layers kept in float."""
    import onnxruntime
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    source, ranges = _graph(path), path.with_name("ranges.json")
    name = source.graph.input[0].name

    class Reader(CalibrationDataReader):
        """The calibration images in batches."""

        def __init__(self) -> None:
            self.batches = iter(np.array_split(inputs, -(-len(inputs) // BATCH)))

        def get_next(self) -> dict[str, np.ndarray] | None:
            batch = next(self.batches, None)
            return None if batch is None else {name: batch}

    def vectors() -> np.ndarray:
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        return np.asarray(session.run(None, {name: inputs[:TRIED_IMAGES]})[0])

    wanted = vectors()

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
        return float((vectors() * wanted).sum(axis=1).mean())

    kept: list[str] = []
    reached = cosine(kept)
    if reached < ENOUGH_COSINE:
        layers = [node.name for node in source.graph.node if node.op_type in LAYERS]
        size = -(-len(layers) // BLOCKS)
        blocks = [layers[at : at + size] for at in range(0, len(layers), size)]
        say(f"trying     {len(blocks)} blocks of layers in float: all in int8 give a mean cosine of {reached:.3f}")
        alone = [cosine(block) for block in blocks]
        for number in np.argsort(alone)[::-1]:
            kept += blocks[number]
            if cosine(kept) >= ENOUGH_COSINE:
                break
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
