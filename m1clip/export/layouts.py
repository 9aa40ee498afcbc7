"""`m1clip export`: a trained model in the format that another program reads."""

import json
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, get_args

from m1clip import console
from m1clip.data.images import BILINEAR, Preprocess
from m1clip.errors import UserError
from m1clip.export import Precision, Target
from m1clip.export.coreml import ProgramEncoder, write_coreml
from m1clip.export.onnx import Layout, write_combined, write_graphs, write_onnx
from m1clip.export.parity import (
    PROGRAM_IMAGES,
    Examples,
    Runtime,
    compare,
    folder_bytes,
    open_examples,
    report_table,
)
from m1clip.export.quantize import CALIBRATION_IMAGES, quantize
from m1clip.formatting import did_you_mean, size
from m1clip.inference import load
from m1clip.inference.model import Model
from m1clip.inference.onnx_encoder import OnnxEncoder, is_onnx_folder, read_settings
from m1clip.inference.torch_encoder import TorchEncoder
from m1clip.io import atomic_folder, write_json, write_text
from m1clip.model.convert import (
    HUGGING_FACE_CLIP,
    OPENCLIP,
    Format,
    check_expressible,
    hf_config,
    openclip_config,
    to_theirs,
)
from m1clip.model.folder import (
    BICUBIC,
    HF_WEIGHTS,
    LINEAR,
    OPENCLIP_CONFIG,
    OPENCLIP_WEIGHTS,
    SavedModel,
    read_model,
    write_model_files,
)
from m1clip.model.named import EXPORT_REPORT, model_name
from m1clip.model.presets import with_fields
from m1clip.model.siglip import (
    HUGGING_FACE_SIGLIP,
    OPENCLIP_SIGLIP,
    hf_siglip_config,
    is_siglip,
    openclip_siglip_config,
)
from m1clip.model.towers import sincos_2d
from m1clip.model.weights import POSITIONS, read_json, replace_tokens, write_tensors
from m1clip.text.base import TOKENIZER_FILE
from m1clip.text.bpe import BpeTokenizer, hugging_face_files, row_sources
from m1clip.text.tokenizers import CharTokenizer, FastTokenizer

Say = Callable[[str], None]
MODULE = "m1clip_module"
ONNX_TARGETS: tuple[Target, ...] = ("onnx", "transformers.js", "immich")
TRANSFORMERS_JS = Layout(
    "onnx/vision_model.onnx",
    "onnx/text_model.onnx",
    (("pixel_values", "image_embeds"), ("input_ids", "text_embeds")),
)


MAX_GRAPH_BYTES = 2**31 - 2**20  # of one file: the limit of protobuf is 2 GiB


class TransformersJsType(NamedTuple):
    """How transformers.js calls a precision, and what the names of its files end with."""

    dtype: str
    ending: str


TRANSFORMERS_JS_TYPES: dict[Precision, TransformersJsType] = {
    "fp32": TransformersJsType("fp32", ""),
    "int8": TransformersJsType("q8", "_quantized"),
    "fp16": TransformersJsType("fp16", "_fp16"),
}
IMMICH = Layout(
    "visual/model.onnx", "textual/model.onnx", (("image", "vector"), ("text", "vector")), int32=True
)
# Immich accepts only the names of its list, each with a fixed size of the vectors: one of each
# size.
IMMICH_NAMES = {
    512: "ViT-B-32__openai",
    640: "RN50x4__openai",
    768: "ViT-L-14__openai",
    1024: "RN50__openai",
    1152: "ViT-SO400M-14-SigLIP-384__webli",
    1536: "ViT-gopt-16-SigLIP2-256__webli",
}
# Writes into the folder and returns notes for the user.
Writer = Callable[[Path, SavedModel], list[str]]


def convert(
    saved: SavedModel,
    to: Target,
    folder: Path,
    check: Callable[[Path], None] = lambda partial: None,
) -> None:
    """Write a model to a new folder, which appears when it is complete and `check` did
    not raise.
    """
    if folder.exists():
        raise UserError(f"{folder}: already exists; choose another --out, or delete it first")
    with atomic_folder(folder) as partial:
        for note in WRITERS[to](partial, saved):
            console.print(f"note       {note}")
        check(partial)


def export(
    model: str | Path,
    to: Target = "onnx",
    out: str | Path | None = None,
    image_size: int | None = None,
    data: tuple[str, ...] = (),
    precision: Precision = "fp32",
    force: bool = False,
) -> Path:
    """Convert a model, compare the result with the original and write the comparison to
    export.json.

    Returns the folder: `out`, or one next to the model. UserError, and no folder, if the result
    differs, unless `force`.
    """
    if not isinstance(model, str | Path):
        raise UserError(
            f"export takes the path of a run or a model folder, not {type(model).__name__}"
        )
    _check_format(to, precision)
    path = Path(model)
    name = model_name(path)
    # A model with a name is exported to the current folder, not into the cache that contains it.
    shown_path = path if name is None else Path(Path(name).name)
    folder = default_folder(shown_path, to, precision) if out is None else Path(out)
    saved = read_model(path).resized(image_size)
    original = Model(TorchEncoder(saved.build(), saved.tokenizer, saved.preprocess, "fp32"))
    examples = open_examples(path, data, original)

    def check(partial: Path) -> None:
        """Convert to the precision, and compare with the original."""
        runtimes = {"torch": Runtime(original, folder_bytes(Path(saved.where)))}
        if precision != "fp32":
            runtimes["onnx fp32"] = _quantize(partial, to, precision, examples)
        exported = _exported_runtime(partial, to, precision, saved)
        runtimes[to if precision == "fp32" else f"{to} {precision}"] = exported
        console.print("comparing  with the original")
        # Where the program crops differently, the vectors differ too: recall decides.
        same = exported.model.preprocess.resize == saved.preprocess.resize
        exact = precision == "fp32" and to != "coreml" and same
        record: dict[str, Any] = {"format": 1, "to": to, "precision": precision, "model": str(path)}
        with console.progress("comparing vectors"):
            record |= compare(runtimes, partial, examples, exact)
        console.print(f"\n{report_table(record)}\n")
        if record["failures"] and not force:
            raise UserError(
                f"not exported: {'; '.join(record['failures'])}. --force writes it anyway"
            )
        write_json(partial / EXPORT_REPORT, record)

    convert(saved, to, folder, check)
    return folder


def _check_format(to: Target, precision: Precision) -> None:
    """Raise UserError for an unknown format or precision, or for two that do not fit."""
    if to not in WRITERS:
        raise UserError(
            f"to={to!r}: unknown format{did_you_mean(str(to), WRITERS)} (all: {', '.join(WRITERS)})"
        )
    if precision not in get_args(Precision):
        raise UserError(f"precision={precision!r}: must be one of {', '.join(get_args(Precision))}")
    if precision != "fp32" and to not in ONNX_TARGETS:
        raise UserError(f"--{precision} is for --to {', '.join(ONNX_TARGETS)}")


def _quantize(folder: Path, to: Target, precision: Precision, examples: Examples) -> Runtime:
    """Convert the graphs in a folder, in place; returns those in fp32, which stay open."""
    full = OnnxEncoder(folder)
    runtime = Runtime(Model(full), folder_bytes(folder))
    pixels = examples.calibration(full.preprocess, CALIBRATION_IMAGES)
    full.pixels(pixels[:1])  # opens the graph, which is then converted
    ending = TRANSFORMERS_JS_TYPES[precision].ending if to == "transformers.js" else ""
    for note in quantize(folder, precision, full, pixels, ending):
        console.print(f"note       {note}")
    return runtime


def _exported_runtime(folder: Path, to: Target, precision: Precision, saved: SavedModel) -> Runtime:
    """What runs the model in a folder that was written."""
    size_bytes = folder_bytes(folder)
    if to == "transformers.js":
        _write_pipeline_files(folder, precision)
    if to == "coreml":
        # Core ML runs on Apple computers only: what the packages were converted from is compared.
        program = Model(ProgramEncoder(with_full_vocabulary(saved)[0]))
        return Runtime(program, size_bytes, own_inputs=True, max_images=PROGRAM_IMAGES, timed=False)
    if is_onnx_folder(folder):
        graph = folder / read_settings(folder)["image_graph"]
        return Runtime(load(folder), size_bytes, own_inputs=True, graph=graph)
    return Runtime(load(folder, precision="fp32"), size_bytes)


def default_folder(model: Path, to: Target, precision: Precision) -> Path:
    """Where an export goes by default: runs/frozen-onnx-int8 for runs/frozen."""
    name = f"{model.stem if model.is_file() else model.name}-{to}"
    return model.with_name(name if precision == "fp32" else f"{name}-{precision}")


def _write_own(folder: Path, saved: SavedModel) -> list[str]:
    model = saved.build()
    write_model_files(folder, model.config, model.state_dict(), saved.tokenizer, saved.preprocess)
    return []


def _as_clip(saved: SavedModel, to: str, crop: str) -> tuple[SavedModel, list[str]]:
    """The model in terms of open_clip and transformers, and what the user should know about it."""
    check_expressible(saved.config, to)
    if isinstance(saved.tokenizer, CharTokenizer):
        others = ", ".join(target for target in WRITERS if target not in ("hf", "openclip"))
        raise UserError(
            f"--to {to}: this program has no character tokenizer; these have one: --to {others}"
        )
    saved, notes = with_full_vocabulary(with_learned_positions(saved))
    if not saved.preprocess.squashes and saved.preprocess.resize.removesuffix(BILINEAR) != crop:
        notes.append(
            "for images with an odd margin, the center crops of open_clip and transformers differ"
            " by one pixel"
        )
    return saved, notes


def with_learned_positions(saved: SavedModel) -> SavedModel:
    """Fixed positions written out as learned ones: the same model in a form that other formats
    support.
    """
    tower = saved.config.image_tower
    if tower.kind != "vit" or tower.positions == "learned":
        return saved
    table = sincos_2d(tower.grid, tower.width)
    positions = table.new_zeros(tower.tokens, tower.width)
    positions[-len(table) :] = table
    config = with_fields(saved.config, positions="learned")
    return replace(saved, config=config, weights={**saved.weights, POSITIONS: positions})


def with_full_vocabulary(saved: SavedModel) -> tuple[SavedModel, list[str]]:
    """CLIP's 49,408 tokens in place of those that the training captions used.

    Other tokenizers stay.
    """
    old = saved.tokenizer
    if not isinstance(old, BpeTokenizer) or old.kept_ids is None:
        return saved, []
    full = BpeTokenizer()
    config = with_fields(saved.config, vocab_size=full.vocab_size)
    note = (
        f"the vocabulary grew from {old.vocab_size:,} to CLIP's {full.vocab_size:,} tokens: text of"
        " known tokens gives the same vectors; a token that the training captions never used"
        " starts as the mean of its parts"
    )
    weights = replace_tokens(saved.weights, row_sources(old, full))
    return replace(saved, config=config, weights=weights, tokenizer=full), [note]


def _write_openclip(folder: Path, saved: SavedModel) -> list[str]:
    """A folder for `open_clip.create_model("local-dir:FOLDER")`."""
    notes: list[str] = []
    names: Format
    if is_siglip(saved.config):
        _check_siglip(saved, "openclip")
        names, config = OPENCLIP_SIGLIP, openclip_siglip_config(saved.config)
        _write_tokenizer(folder, saved, saved.config.own_towers[1].fill_id)
    else:
        saved, notes = _as_clip(saved, "openclip", "shortest")
        names, config = OPENCLIP, openclip_config(saved.config)
    weights = to_theirs(saved.weights, names, saved.config)
    write_tensors(folder / OPENCLIP_WEIGHTS[0], weights, {"format": "pt"})
    preprocess = saved.preprocess
    preprocess_config = {
        "size": preprocess.image_size,
        "mode": "RGB",
        "mean": list(preprocess.mean),
        "std": list(preprocess.std),
        "interpolation": "bilinear" if preprocess.bilinear else "bicubic",
        "resize_mode": "squash" if preprocess.squashes else "shortest",
        "fill_color": 0,
    }
    write_json(folder / OPENCLIP_CONFIG, {"model_cfg": config, "preprocess_cfg": preprocess_config})
    return notes


def _write_hf(folder: Path, saved: SavedModel) -> list[str]:
    """A folder for transformers' `CLIPModel.from_pretrained`, or SigLIP's."""
    if is_siglip(saved.config):
        return _write_hf_siglip(folder, saved)
    saved, notes = _as_clip(saved, "hf", "shortest-floor")
    preprocess, tokenizer = saved.preprocess, saved.tokenizer
    if preprocess.squashes:
        raise UserError(
            "this model squashes images to a square, which CLIPImageProcessor does not support"
        )
    write_tensors(
        folder / HF_WEIGHTS[0],
        to_theirs(saved.weights, HUGGING_FACE_CLIP, saved.config),
        {"format": "pt"},
    )
    write_json(folder / "config.json", hf_config(saved.config, tokenizer.sot_id, tokenizer.eot_id))
    write_json(folder / "preprocessor_config.json", _image_processor(preprocess))
    for name, text in hugging_face_files(saved.config.context_length).items():
        write_text(folder / name, text)
    return notes


def _write_hf_siglip(folder: Path, saved: SavedModel) -> list[str]:
    """A folder for transformers' `SiglipModel.from_pretrained`."""
    _check_siglip(saved, "hf")
    weights = to_theirs(saved.weights, HUGGING_FACE_SIGLIP, saved.config)
    write_tensors(folder / HF_WEIGHTS[0], weights, {"format": "pt"})
    write_json(folder / "config.json", hf_siglip_config(saved.config))
    write_json(folder / "preprocessor_config.json", _image_processor(saved.preprocess, "Siglip"))
    _write_tokenizer(folder, saved, saved.config.own_towers[1].fill_id)
    return []


def _check_siglip(saved: SavedModel, to: str) -> None:
    """Raise UserError for what the libraries' SigLIP cannot express."""
    activations = {tower.activation for tower in saved.config.own_towers}
    odd = ["quick_gelu"] if to == "openclip" and "quick_gelu" in activations else []
    if not isinstance(saved.tokenizer, FastTokenizer):
        odd.append("a tokenizer of m1clip")
    if not saved.preprocess.squashes and to == "hf":
        odd.append("images that are cropped")
    if odd:
        raise UserError(f"this SigLIP cannot be exported to {to}: {', '.join(odd)}; use --to onnx")


def _write_sentence_transformers(folder: Path, saved: SavedModel) -> list[str]:
    """A folder for `SentenceTransformer(FOLDER)`: transformers' CLIPModel, or else ONNX graphs and
    custom code.
    """
    try:
        if is_siglip(saved.config):
            raise UserError("sentence-transformers has no module for SigLIP")
        notes = _write_hf(folder, saved)
        modules = [
            "sentence_transformers.models.CLIPModel",
            "sentence_transformers.models.Normalize",
        ]
    except UserError:
        write_onnx(folder, saved)
        write_text(
            folder / f"{MODULE}.py", (files("m1clip.export") / f"{MODULE}.txt").read_text("utf-8")
        )
        notes = [
            f"custom code in {MODULE}.py: load it with SentenceTransformer(FOLDER,"
            " trust_remote_code=True)"
        ]
        modules = [f"{MODULE}.OnnxClip"]
    paths = ("", "1_Normalize")
    entries = [
        {"idx": at, "name": str(at), "path": paths[at], "type": module}
        for at, module in enumerate(modules)
    ]
    write_text(folder / "modules.json", json.dumps(entries, indent=1))
    return notes


def _image_processor(preprocess: Preprocess, family: str = "CLIP") -> dict[str, Any]:
    """The config of a CLIPImageProcessor, or of another one with the same settings."""
    size, crop = preprocess.image_size, not preprocess.squashes
    square = {"height": size, "width": size}
    return {
        "image_processor_type": f"{family}ImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": size} if crop else square,
        "resample": LINEAR if preprocess.bilinear else BICUBIC,
        "do_center_crop": crop,
        "crop_size": square,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "do_convert_rgb": True,
        "image_mean": list(preprocess.mean),
        "image_std": list(preprocess.std),
    }


def _write_tokenizer(folder: Path, saved: SavedModel, pad_id: int | None = None) -> None:
    """tokenizer.json and its config; `pad_id` is the padding, by default that of the tokenizer."""
    library, context = saved.tokenizer.library(), saved.config.context_length
    pad_id = saved.tokenizer.pad_id if pad_id is None else pad_id
    library.enable_truncation(context)
    write_text(folder / TOKENIZER_FILE, library.to_str())
    names = {"pad_token": pad_id, "eos_token": saved.tokenizer.eot_id}
    config: dict[str, Any] = {name: library.id_to_token(token) for name, token in names.items()}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context}
    write_json(folder / "tokenizer_config.json", config)


def _write_transformers_js(folder: Path, saved: SavedModel) -> list[str]:
    """The graphs for CLIPTextModelWithProjection and CLIPVisionModelWithProjection of
    transformers.js.
    """
    saved, notes = with_full_vocabulary(saved)
    write_graphs(folder, saved, TRANSFORMERS_JS)
    _write_tokenizer(folder, saved)
    write_json(
        folder / "config.json", {"model_type": "clip", "projection_dim": saved.config.embed_dim}
    )
    write_json(folder / "preprocessor_config.json", _image_processor(saved.preprocess))
    return notes


def _write_pipeline_files(folder: Path, precision: Precision) -> None:
    """What pipeline('zero-shot-image-classification') needs: one graph with logits, and the default
    dtype.
    """
    dtype, ending = TRANSFORMERS_JS_TYPES[precision]
    if folder_bytes(folder / "onnx") > MAX_GRAPH_BYTES:
        console.print(
            "note       no graph of both towers for ready-made pipelines: it would have more than 2 GB"
        )
        return
    path = write_combined(folder, ending)
    console.print(
        f"writing    {path.relative_to(folder)}, both towers for ready-made pipelines: {size(path.stat().st_size)}"
    )
    config = read_json(folder / "config.json")
    write_json(folder / "config.json", {**config, "transformers.js_config": {"dtype": dtype}})


def _write_coreml(folder: Path, saved: SavedModel) -> list[str]:
    saved, notes = with_full_vocabulary(saved)
    return [*notes, *write_coreml(folder, saved)]


def _write_immich(folder: Path, saved: SavedModel) -> list[str]:
    """A folder for the machine-learning service of Immich."""
    saved, notes = with_full_vocabulary(saved)
    width = next((size for size in IMMICH_NAMES if size >= saved.config.embed_dim), None)
    if width is None:
        raise UserError(
            f"Immich takes vectors of at most {max(IMMICH_NAMES)} numbers, not"
            f" {saved.config.embed_dim}"
        )
    if saved.preprocess.resize != "shortest-floor":
        notes.append("Immich crops images in its own way: recall is measured with it")
    preprocess = replace(saved.preprocess, resize="shortest-floor")
    write_graphs(folder, replace(saved, preprocess=preprocess), IMMICH, width)
    _write_tokenizer(folder / "textual", saved)
    text = {"context_length": saved.config.context_length}
    write_json(folder / "config.json", {"embed_dim": width, "text_cfg": text})
    preprocess_config = {
        "size": preprocess.image_size,
        "mean": preprocess.mean,
        "std": preprocess.std,
        "interpolation": "bicubic",
    }
    write_json(folder / "visual" / "preprocess_cfg.json", preprocess_config)
    name = IMMICH_NAMES[width]
    return [
        *notes,
        (
            f"copy the folder to clip/{name} in Immich's model cache, and choose {name} in its"
            " settings"
        ),
    ]


WRITERS: dict[Target, Writer] = {
    "onnx": write_onnx,
    "transformers.js": _write_transformers_js,
    "immich": _write_immich,
    "coreml": _write_coreml,
    "sentence-transformers": _write_sentence_transformers,
    "hf": _write_hf,
    "openclip": _write_openclip,
    "safetensors": _write_own,
}
