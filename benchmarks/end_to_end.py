"""The whole command, on both sides: train ViT-B/32 on JPEG files for a few epochs, and where the time goes.

    python benchmarks/end_to_end.py --images 300 --model tiny --batch-size 32     # two cores
    python benchmarks/end_to_end.py --device cuda --json docs/results/end_to_end.json
    python benchmarks/end_to_end.py --device cuda --before ../m1clip-of-yesterday --rounds 2

The files are made by the script (photo_set.py) and are in the page cache; m1clip's own cache is
empty. `m1clip` is `m1clip train`, which also evaluates, and saves two models; `m1clip, no cache`
decodes with --cache off --workers. open_clip (set PEERS, and PEER_SOURCE for a checkout) is its
training command with as many workers, without an evaluation. `before` is `m1clip train` of another
checkout. With --rounds the sides alternate, and the median run of each is shown. Same work: AdamW, complete images (no
patch dropout), one caption per image, 77 tokens at most.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from photo_set import write_set
from sides import machine, variables_for, write

SIDES = ("m1clip", "m1clip, no cache", "open_clip")
BEFORE = "before"
# One line of open_clip's log: the time, and for steps the images of the epoch so far.
STAMP = re.compile(r"^(\d{4}-\d\d-\d\d,\d\d:\d\d:\d\d) \| INFO \| (.*)")
STEP = re.compile(r"Train Epoch: (\d+) \[\s*(\d+)/")
# What tiny is called there, with the sizes of --model tiny.
TINY = {
    "embed_dim": 256,
    "vision_cfg": {"image_size": 112, "layers": 6, "width": 256, "head_width": 64, "patch_size": 16},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 256, "heads": 4, "layers": 4},
}  # fmt: skip


def run_m1clip(
    options: argparse.Namespace, photos: Path, folder: Path, side: str
) -> dict[str, Any]:
    """`m1clip train` in a process of its own: its seconds by part, and the speed of its steps."""
    out = folder / "run"
    cached = side != "m1clip, no cache"
    words = [str(photos), "--recipe", "scratch", "--model", options.model, "--out", str(out)]
    words += ["--batch-size", options.batch_size, "--epochs", options.epochs]
    words += ["--optimizer", "adamw", "--patch-dropout", 0, "--captions-per-step", 1]
    words += ["--tokenizer", "clip-bpe"] if options.bpe else []
    words += ["--device", options.device, "--cache-dir", folder / "cache"]
    words += [] if cached else ["--cache", "off", "--workers", options.workers]
    words += options.options
    variables = variables_for(sys.executable)
    working_folder = None
    if side == BEFORE:
        working_folder = folder  # python -m takes the package of a checkout that it is started in
        own_tree = str(Path(__file__).resolve().parents[1])
        rest = [path for path in variables.get("PYTHONPATH", "").split(":") if path != own_tree]
        variables["PYTHONPATH"] = ":".join([str(options.before.resolve()), *rest])
    seconds, output = timed(
        [sys.executable, "-m", "m1clip", "train", *words],
        folder / "m1clip.txt",
        variables,
        working_folder,
    )
    log = [json.loads(line) for line in (out / "run.jsonl").read_text().splitlines()]
    steps = [record for record in log if record["kind"] == "step"]
    (end,) = [record for record in log if record["kind"] == "end"]
    images = end["step"] * options.batch_size
    parts = end["time_use"]
    speeds = sorted(record["images_per_second"] for record in steps)
    return {
        "seconds": seconds,
        "parts": parts | {"exit": round(seconds - sum(parts.values()), 3)},
        "images": images,
        "images_per_second_of_training": images / parts["training"],
        "images_per_second_in_steps": speeds[len(speeds) // 2],
        "data_fraction": end["data_fraction"],
        "output": [
            line
            for line in output.splitlines()
            if line.startswith(("time ", "device ", "training "))
        ],
    }


def run_open_clip(options: argparse.Namespace, photos: Path, folder: Path) -> dict[str, Any]:
    """open_clip's training command: seconds until its first step, of its epochs, and between them."""
    name = "tiny-112" if options.model == "tiny" else options.model
    (folder / "tiny-112.json").write_text(json.dumps(TINY), encoding="utf-8")
    entry = Path(__file__).parent / "peers" / "open_clip_entry.py"
    settings: dict[str, Any] = {
        "model": name, "train-data": photos / "train.tsv", "dataset-type": "csv",
        "csv-separator": "\t", "csv-img-key": "filepath", "csv-caption-key": "title",
        "batch-size": options.batch_size, "epochs": options.epochs, "workers": options.workers,
        "precision": "amp_bf16", "device": options.device, "logs": folder, "name": "peer",
        "log-every-n-steps": 1, "save-frequency": 1, "save-most-recent": None, "warmup": 10, "lr": "5e-4",
    }  # fmt: skip
    words = [
        str(w) for key, value in settings.items() for w in (f"--{key}", value) if w is not None
    ]
    begin = datetime.now()
    python = os.environ.get("PEERS", sys.executable)
    seconds, output = timed(
        [python, str(entry), "cli", str(folder), *words], folder / "peer.txt", variables_for(python)
    )
    marks: list[tuple[datetime, int, int]] = []
    for line in output.splitlines():
        stamped = STAMP.match(line)
        step = stamped and STEP.search(stamped[2])
        if stamped and step:
            when = datetime.strptime(stamped[1], "%Y-%m-%d,%H:%M:%S")
            marks.append((when, int(step[1]), int(step[2])))
    if not marks:
        raise SystemExit(f"open_clip logged no steps:\n{output[-3000:]}")
    first = (marks[0][0] - begin).total_seconds()
    training = (marks[-1][0] - marks[0][0]).total_seconds()
    per_epoch: dict[int, int] = {epoch: images_seen for _, epoch, images_seen in marks}
    images = sum(per_epoch.values())
    steady = []
    for epoch in per_epoch:
        own = [(when, images_seen) for when, number, images_seen in marks if number == epoch]
        span = (own[-1][0] - own[0][0]).total_seconds()
        steady.append((own[-1][1] - own[0][1]) / span if span else 0.0)
    return {
        "seconds": seconds,
        "parts": {
            "until the first step": first,
            "training": training,
            "rest": seconds - first - training,
        },
        "images": images,
        "images_per_second_of_training": images / max(training, 1.0),
        "images_per_second_within_epochs": max(steady),
    }


def timed(
    command: list[Any], log: Path, variables: dict[str, str], working_folder: Path | None = None
) -> tuple[float, str]:
    """Seconds of a command, and its output."""
    begin = time.perf_counter()
    with log.open("w+", encoding="utf-8") as file:
        code = subprocess.run(
            list(map(str, command)),
            stdout=file,
            stderr=subprocess.STDOUT,
            env=variables,
            cwd=working_folder,
            check=False,
        ).returncode
        file.seek(0)
        output = file.read()
    if code:
        raise SystemExit(f"{command} ended with {code}:\n{output[-3000:]}")
    return time.perf_counter() - begin, output


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=24_000)
    parser.add_argument(
        "--model", default="ViT-B-32", help="preset, with the same name in open_clip; or tiny"
    )
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--before", type=Path, help="another checkout of m1clip, as one more side")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--bpe", action="store_true", help="the tokens of open_clip for m1clip too")
    parser.add_argument(
        "--photos", type=Path, help="folder of the set; made there if it is missing"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("options", nargs="*", help="after --: further options of m1clip train")
    options = parser.parse_args()
    result: dict[str, Any] = {"machine": machine(), "sides": {}}
    result["options"] = {
        name: value
        for name, value in vars(options).items()
        if name not in ("json", "photos", "before")
    }
    sides = [*options.sides, *([BEFORE] if options.before else [])]
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as temporary:
        photos = (options.photos or Path(temporary) / "photos").resolve()
        write_set(photos, options.images, max(20, options.images // 48))
        for turn in range(options.rounds):
            for side in sides[:: -1 if turn % 2 else 1]:
                folder = Path(temporary) / "side"
                folder.mkdir()
                try:
                    if side == "open_clip":
                        figures_of_run = run_open_clip(options, photos, folder)
                    else:
                        figures_of_run = run_m1clip(options, photos, folder, side)
                except SystemExit as error:
                    figures_of_run = {"failed": str(error)[-2000:]}
                shutil.rmtree(folder)
                runs[side].append(figures_of_run)
                show(side, figures_of_run)
                result["sides"][side] = median_run(runs[side])
                result["rows"] = rows(result)
                if options.json:  # what there is: the time on a borrowed card may end
                    write(options.json, result)


def median_run(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The run of median seconds, the faster one of the two in the middle, and the seconds of all."""
    complete = sorted((run for run in runs if "failed" not in run), key=lambda run: run["seconds"])
    if not complete:
        return runs[-1]
    middle = complete[(len(complete) - 1) // 2]
    return {**middle, "all_seconds": [run["seconds"] for run in complete]}


def rows(result: dict[str, Any]) -> list[dict[str, str]]:
    """Lines for docs/benchmarks.md."""
    options = result["options"]
    device = "" if options["device"] == "cpu" else f" --device {options['device']}"
    subject = (
        f"the whole command, {options['images']:,} JPEG of 500 x 375, {options['model']}, batch"
        f" {options['batch_size']:,}, {options['epochs']} epochs"
    )
    lines = []
    for side, figures_of_side in result["sides"].items():
        if "failed" not in figures_of_side:
            largest = sorted(figures_of_side["parts"].items(), key=lambda part: -part[1])[:4]
            parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in largest)
            seconds = figures_of_side["all_seconds"]
            others = ", ".join(f"{value:.1f}" for value in seconds)
            figure = f"**{figures_of_side['seconds']:.1f} s** ({parts})"
            figure += f"; all runs {others}" if len(seconds) > 1 else ""
            command = f"python benchmarks/end_to_end.py{device}"
            command += " --before CHECKOUT" if BEFORE in result["sides"] else ""
            command += f" --rounds {options['rounds']}" if options["rounds"] > 1 else ""
            n = str(len(seconds))
            lines.append(
                {"what": f"{subject}: {side}", "figure": figure, "n": n, "command": command}
            )
    return lines


def show(side: str, figures_of_side: dict[str, Any]) -> None:
    """A line of the table."""
    if "failed" in figures_of_side:
        print(f"{side}: FAILED {figures_of_side['failed']}", flush=True)
        return
    parts = ", ".join(f"{name} {value:.1f}" for name, value in figures_of_side["parts"].items())
    speeds = ", ".join(
        f"{figures_of_side[key]:,.0f} {key.removeprefix('images_per_second_').replace('_', ' ')}"
        for key in figures_of_side
        if key.startswith("images_per_second")
    )
    print(
        f"{side}: {figures_of_side['seconds']:.1f} s for {figures_of_side['images']:,} images ({parts}); images/s:"
        f" {speeds}",
        flush=True,
    )


if __name__ == "__main__":
    main()
