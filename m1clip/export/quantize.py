"""ONNX graphs in int8 or fp16: weights of a quarter or half the size.

Layers that int8 would harm stay in float.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np

from m1clip import console
from m1clip.export import Precision
from m1clip.formatting import plural
from m1clip.inference.onnx_encoder import SETTINGS, OnnxEncoder, read_settings
from m1clip.io import write_json

CALIBRATION_IMAGES = 64
TRIED = 32  # of them, to find the layers that int8 harms
CALIBRATION_BATCH = 8
BLOCK_LAYERS = 4  # consecutive layers that are tried in float together
# Mean cosine with the float vectors at which no further block stays in float.
ENOUGH_COSINE = 0.999
QUANTIZED_BLOCK = 64  # weights, and activations, with one scale
QUANTIZED_LAYERS = ("Conv", "MatMul")
# Quantized together with the layer before them: the range before ReLU6 is much larger, and most of
# it is cut off.
BOUNDS = ("Clip", "Relu")


def quantize(
    folder: Path, precision: Precision, encoder: OnnxEncoder, pixels: np.ndarray, ending: str = ""
) -> list[str]:
    """Convert the graphs of a folder in place; `encoder` runs their float version.

    Returns notes for the user.

    `pixels` calibrate int8. `ending` is added to the names of the graphs.
    """
    settings, notes = read_settings(folder), []
    for name in ("image", "text"):
        path = folder / settings[f"{name}_graph"]
        console.print(f"converting {path.name} to {precision}")
        title = f"converting {path.name}"
        with _without_messages_of_onnxruntime(), console.progress(title) as refresh:
            refresh(0, 1)  # `_float_layers` counts more
            if precision == "fp16":
                _to_fp16(path)
            elif name == "text":
                _int8_text(path)
            elif float_layers := _int8_image(path, encoder.graph_input(pixels)):
                stay = "stays" if len(float_layers) == 1 else "stay"
                notes.append(
                    f"{plural(len(float_layers), 'layer')} of {path.name} {stay} in float ({float_layers[0]}, ...)"
                )
        renamed = path.rename(path.with_stem(path.stem + ending))
        settings[f"{name}_graph"] = renamed.relative_to(folder).as_posix()
    write_json(folder / SETTINGS, settings)
    return notes


def _outputs(path: Path, inputs: np.ndarray) -> list[np.ndarray]:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return [
        np.asarray(output) for output in session.run(None, {session.get_inputs()[0].name: inputs})
    ]


def _float_layers(graph: Any, cosine: Callable[[list[str]], float]) -> list[str]:
    """The layers to keep in float: blocks in the order of the gain of each alone, until the cosine
    is high enough.
    """
    weights = {tensor.name for tensor in graph.initializer}
    layers = [
        node.name
        for node in graph.node
        if node.op_type in QUANTIZED_LAYERS and weights & set(node.input)
    ]
    parts = [layers[at : at + BLOCK_LAYERS] for at in range(0, len(layers), BLOCK_LAYERS)]
    refresh = console.current_progress()
    conversions = 1 + len(parts)  # with nothing in float, and with each block
    refresh(0, conversions)
    float_layers: list[str] = []
    reached = cosine(float_layers)
    if reached >= ENOUGH_COSINE:
        return float_layers
    console.print(
        f"trying     {plural(len(parts), 'block')} of layers in float: all in int8 give a mean cosine of {reached:.4f}"
    )
    alone = []
    for done, part in enumerate(parts, 1):
        refresh(done, conversions)
        alone.append(cosine(part))
    for done, number in enumerate(np.argsort(alone)[::-1], conversions):
        refresh(done, conversions + len(parts))  # at most: usually a few blocks are enough
        float_layers += parts[number]
        if cosine(float_layers) >= ENOUGH_COSINE:
            break
    return float_layers


def _to_fp16(path: Path) -> None:
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16

    onnx.save(convert_float_to_float16(onnx.load(str(path)), keep_io_types=True), str(path))


def _graph(path: Path) -> Any:
    """The graph without torch's annotations of shapes, some of which are wrong after its
    optimizations.
    """
    import onnx

    model = onnx.load(str(path))
    del model.graph.value_info[:]
    return model


def _in_blocks(model: Any, excluded: Iterable[str] = ()) -> Any:
    """Quantize the layers that are not `left` to int8, with one scale per block of weights and of a
    row's activations.

    With one scale for all activations of a batch, a few large ones would leave little of the range
    for the others.
    """
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
    from onnxruntime.quantization.onnx_model import ONNXModel

    source = ONNXModel(model)
    source.replace_gemm_with_matmul()
    compute_int8 = 4
    quantizer = MatMulNBitsQuantizer(
        source.model,
        bits=8,
        block_size=QUANTIZED_BLOCK,
        is_symmetric=True,
        accuracy_level=compute_int8,
        nodes_to_exclude=list(excluded),
    )
    quantizer.process()
    return quantizer.model.model


def _int8_text(path: Path) -> None:
    import onnx

    model = _in_blocks(_graph(path))
    _int8_embeddings(model.graph)
    onnx.save(model, str(path))


def _int8_embeddings(graph: Any) -> None:
    """Store embedding tables in int8, with one scale per row."""
    from onnx import TensorProto, helper, numpy_helper

    tables = {
        tensor.name: tensor for tensor in graph.initializer if tensor.data_type == TensorProto.FLOAT
    }
    for node_index, node in reversed(list(enumerate(graph.node))):
        if (
            node.op_type != "Gather"
            or node.input[0] not in tables
            or len(tables[node.input[0]].dims) != 2
        ):
            continue
        name, ids = node.input
        values = numpy_helper.to_array(tables[name])
        scale = np.maximum(np.abs(values).max(axis=1, keepdims=True) / 127, 1e-12).astype(
            np.float32
        )
        rows, scales, real = (f"{name}_{part}" for part in ("rows", "scales", "float"))
        steps = (
            helper.make_node("Gather", [name, ids], [rows]),
            helper.make_node("Cast", [rows], [real], to=TensorProto.FLOAT),
            helper.make_node("Gather", [f"{name}_scale", ids], [scales]),
            helper.make_node("Mul", [real, scales], list(node.output)),
        )
        tables[name].CopyFrom(
            numpy_helper.from_array(np.round(values / scale).astype(np.int8), name)
        )
        graph.initializer.append(numpy_helper.from_array(scale, f"{name}_scale"))
        graph.node.remove(node)
        for offset, step in enumerate(steps):
            graph.node.insert(node_index + offset, step)


def _int8_image(path: Path, inputs: np.ndarray) -> list[str]:
    """Weights and activations in int8, with ranges from the calibration images.

    Returns the layers kept in float.
    """
    from onnxruntime.quantization import (
        CalibrationDataReader,
        QuantFormat,
        QuantType,
        quantize_static,
    )

    source, ranges = _graph(path), path.with_name("ranges.json")
    name, tried = source.graph.input[0].name, inputs[:TRIED]
    expected = _outputs(path, tried)[0]
    batches = np.array_split(inputs, -(-len(inputs) // CALIBRATION_BATCH))
    # The heads.
    source = _in_blocks(
        source, [node.name for node in source.graph.node if node.op_type == "MatMul"]
    )
    means = _mean_inputs(source, path, batches)

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.batches = iter(batches)

        def get_next(self) -> dict[str, np.ndarray] | None:
            batch = next(self.batches, None)
            return None if batch is None else {name: batch}

    def cosine(float_layers: list[str]) -> float:
        """Write the graph with these layers in float; its mean cosine with the float vectors."""
        quantize_static(
            _correct_biases(source, means, float_layers),
            path,
            Reader(),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=[*QUANTIZED_LAYERS, *BOUNDS],
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            nodes_to_exclude=float_layers,
            calibration_cache_path=ranges,
            # Products of two activations have no weights to shrink.
            extra_options={"MatMulConstBOnly": True},
        )
        return float((_outputs(path, tried)[0] * expected).sum(axis=1).mean())

    float_layers = _float_layers(source.graph, cosine)
    ranges.unlink(missing_ok=True)
    return float_layers


def _mean_inputs(source: Any, path: Path, batches: list[np.ndarray]) -> dict[str, np.ndarray]:
    """For each convolution with a bias, the mean of each channel of its input; writes to `path`."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    layers = [node for node in source.graph.node if node.op_type == "Conv" and len(node.input) == 3]
    if not layers:
        return {}
    model = deepcopy(source)
    model.graph.initializer.append(numpy_helper.from_array(np.array([0, 2, 3]), "mean_axes"))
    for node in layers:
        mean = f"{node.name}_mean"
        model.graph.node.append(
            helper.make_node("ReduceMean", [node.input[0], "mean_axes"], [mean], keepdims=0)
        )
        model.graph.output.append(helper.make_tensor_value_info(mean, TensorProto.FLOAT, None))
    onnx.save(model, str(path))
    means_of_batches = [_outputs(path, batch)[1:] for batch in batches]
    return {
        node.name: np.mean(values, axis=0)
        for node, *values in zip(layers, *means_of_batches, strict=True)
    }


def _correct_biases(source: Any, means: dict[str, np.ndarray], float_layers: list[str]) -> Any:
    """Add to the biases what the mean outputs lose by rounding the weights: it is most of the error
    of int8.
    """
    from onnx import numpy_helper

    model = deepcopy(source)
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        if (
            node.name not in means
            or node.name in float_layers
            or not tensors.keys() >= set(node.input[1:])
        ):
            continue
        weight, bias = (numpy_helper.to_array(tensors[name]) for name in node.input[1:])
        scale = np.maximum(np.abs(weight).max(axis=(1, 2, 3), keepdims=True) / 127, 1e-12)
        lost = (weight - np.round(weight / scale) * scale).sum(axis=(2, 3))  # (out, in of a group)
        groups = len(means[node.name]) // lost.shape[1]
        change = lost.reshape(groups, -1, lost.shape[1]) @ means[node.name].reshape(groups, -1, 1)
        tensors[node.input[2]].CopyFrom(
            numpy_helper.from_array(bias + change.reshape(-1), node.input[2])
        )
    return model


@contextmanager
def _without_messages_of_onnxruntime() -> Iterator[None]:
    """Silence what onnxruntime writes to the root logger, whose level and handlers it changes too.

    Messages of m1clip and its progress are still shown.
    """

    def is_error(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    root = logging.root
    own = logging.getLogger("onnxruntime")
    level, handlers, own_level = root.level, list(root.handlers), own.level
    root.addFilter(is_error)
    own.setLevel(logging.ERROR)
    try:
        yield
    finally:
        own.setLevel(own_level)
        root.removeFilter(is_error)
        root.setLevel(level)
        root.handlers[:] = handlers
