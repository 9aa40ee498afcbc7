"""Run each command of the installed m1clip once, with small work, in the current folder.

    python tests/wheel_smoke.py

test_wheel.py starts it in an environment that has only the wheel, whose preset it changes. All
commands run in this process, so torch is imported once. The names are compared with those that the
command line itself lists: a new command without a line here fails.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from importlib import resources
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent / "data" / "captioning"))

import fake_server
from fake_hub import FakeHub
from fake_server import completion

from m1clip.bench import compare
from m1clip.bench.compare import configurations
from m1clip.cli.main import app, main
from m1clip.model.presets import PRESETS, with_fields
from m1clip.training import learning_curve

# Steps of the complete model would take most of the time. Here, since the processes of a comparison
# import this module too.
PRESETS["tiny"] = with_fields(
    PRESETS["tiny"],
    image_size=32,
    vision_width=32,
    vision_layers=1,
    vision_heads=1,
    text_width=32,
    text_layers=1,
    text_heads=1,
)

SMALL = (
    "--recipe scratch --model tiny --image-size 32 --vision-width 32 --vision-layers 1 "
    "--text-width 32 --text-layers 1 --batch-size 8 --device cpu --precision fp32 "
    "--threads 1"
)
COMPARED = "--model tiny --batch-size 1 --device cpu --precision fp32 --minutes 30"
# Each command, in the order in which they run: its arguments, and a part of what it prints.
COMMANDS = [
    ("data formats", "", "webdataset"),
    ("compare", COMPARED, "the fastest of 1"),
    ("data make", "scenes --count 48 --image-size 32", "48 images"),
    ("data lint", "scenes", "verdict:"),
    ("train", f"scenes {SMALL} --steps 1000000 --out runs/long --background", "runs/long"),
    ("data template", "photos", "24 images"),
    ("data caption", "photos --server {vision} --limit 2", "2 captions by vision"),
    ("data pack", "scenes shards --shard-size 30", "48 images"),
    ("data index", "shards", "48 images"),
    ("plan", f"scenes {SMALL} --steps 2", "Nothing was trained."),
    ("stop", "runs/long", "stopped"),
    ("train", f"scenes {SMALL} --steps 2 --out runs/small", "test split, not seen in training"),
    ("demo", "--out runs/demo", "m1clip report runs/demo"),
    ("runs", "", "finished"),
    ("checkpoints", "runs/small --verify", "valid"),
    ("monitor", "runs/small --once", "finished at step 2"),
    ("report", "runs/small", "report.html"),
    ("eval", "runs/small --device cpu", "mean recall"),
    ("data howmany", "scenes --model runs/small --device cpu", "100 more captions"),
    ("classify", "photos/train-000000.png --labels tree,house --model runs/small", "tree"),
    ("export", "runs/small --to safetensors --out exported", "compared"),
    ("download", "somebody/small --yes", "somebody/small"),
    ("models", "", "general"),
    ("index", "photos --model runs/small", "24 new"),
    ("search", "house --index photos --all", "train-000000.png"),
    (
        "teach",
        "Rex photos/train-000000.png photos/train-000001.png --index photos",
        "2 photos with it",
    ),
    ("duplicates", "photos", "groups"),
    ("doctor", "", "torch"),
]
IN_A_PROCESS = {"serve"}  # does not end by itself
MAY_WARN = {"doctor"}  # exit code 1 if this machine has a problem
# What would take long otherwise: repetitions of a measurement, and their seconds.
FEWER: list[tuple[object, str, object]] = [
    (learning_curve, "DRAWS", 1),
    (compare, "configurations", lambda *values: configurations(*values)[:1]),
    (compare, "COMPARED_SECONDS", 0.1),
    (compare, "STABILITY_STEPS", 4),
    (compare, "OVERHEAD_SECONDS", 0.1),
    (compare, "LOADING_SECONDS", math.inf),  # so it is left out
    (compare, "MAX_SLOW_SECONDS", 600.0),  # on a busy machine
]
SMALL_DEMO = """
[model]
name = "tiny"
image_size = 32
vision_width = 32
vision_layers = 1
text_width = 32
text_layers = 1
[data]
source = ["synthetic"]
synthetic_images = 72
[train]
steps = 2
batch_size = 8
threads = 1
precision = "fp32"
[transfer]
recipe = "scratch"
"""


def command_names() -> set[str]:
    """The commands that the installed command line lists, with subcommands."""
    names = set()
    for name in app:
        if name.startswith("-"):
            continue
        subcommands = [sub for sub in app[name] if not sub.startswith("-")]
        names |= {f"{name} {sub}" for sub in subcommands} or {name}
    return names


def run(command: str, arguments: str, **values: Any) -> str:
    """What a command prints; fails unless it succeeds."""
    words = command.split() + arguments.format(**values).split()
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            main(words)
        except SystemExit as end:
            code = end.code
    allowed = (0, 1) if command in MAY_WARN else (0,)
    assert code in allowed, f"m1clip {' '.join(words)} ended with {code}:\n{output.getvalue()}"
    return output.getvalue()


def serve_a_page() -> None:
    """`m1clip serve` prints the address of its page, answers there, and ends with Ctrl-C."""
    words = ["-m", "m1clip", "serve", "photos", "--port", "0", "--no-browser"]
    with subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = next(line for line in process.stdout if "http://" in line)
            (address,) = [word for word in line.split() if word.startswith("http://")]
            with urllib.request.urlopen(address, timeout=60) as page:
                assert b"m1clip" in page.read()
        finally:
            process.send_signal(signal.SIGINT)


def run_all() -> None:
    """Run all commands; raises AssertionError for one that fails or has no line above."""
    expected = command_names()
    listed = {command for command, _, _ in COMMANDS} | IN_A_PROCESS
    assert listed == expected, f"differ in {sorted(listed ^ expected)}"
    # The demo of the wheel takes minutes, so it gets fewer steps of a smaller model.
    preset = resources.files("m1clip") / "presets" / "demo.toml"
    Path(str(preset)).write_text(SMALL_DEMO, encoding="utf-8")
    for module, name, value in FEWER:
        assert hasattr(module, name)
        setattr(module, name, value)
    hub = FakeHub()
    hub.start()
    os.environ["HF_ENDPOINT"] = hub.url
    with fake_server.serve(lambda request, number: completion("A red house.")) as vision:
        for command, arguments, part in COMMANDS:
            if command == "data template":
                Path("photos").mkdir()
                for image in sorted(Path("scenes/images").iterdir())[:24]:
                    shutil.copy(image, "photos")
            if command == "download":
                hub.add_folder("somebody/small", Path("exported"))
            printed = run(command, arguments, vision=vision.url)
            assert part in printed, f"m1clip {command} {arguments} printed no {part!r}:\n{printed}"
            print(f"ok m1clip {command}", flush=True)
    serve_a_page()
    print("ok m1clip serve")
    hub.stop()


if __name__ == "__main__":
    run_all()
