"""m1clip as an entry of the speedrun (docs/speedrun.md): python entry_m1clip.py probe|train|encode JOB.json."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from m1clip.config import load_config
from m1clip.runlog import read_log

RESERVE = 0.01  # of the clock: what `--minutes` may take longer
STOPPING = 0.005  # of the clock: stopping takes the current step and a checkpoint


def command(job: dict[str, Any], run: Path, duration: tuple[str, ...]) -> list[str]:
    """`m1clip train` with its own cache, so that decoding is inside the clock."""
    words = [sys.executable, "-m", "m1clip", "train", "--data", job["data"], "--out", str(run)]
    words += ["--seed", str(job["seed"]), "--device", job["device"], "--cache-dir", f"{run}-cache"]
    return [*words, *job["options"], *duration]


def environment(run: Path) -> dict[str, str]:
    """Nothing remembered from earlier runs, such as the fastest device: that would be work outside the clock."""
    return {**os.environ, "XDG_CACHE_HOME": f"{run}-home"}


def probe(job: dict[str, Any]) -> dict[str, Any]:
    """Seconds from the start of the process until `--minutes` begins to count."""
    begin = time.time()
    subprocess.run([sys.executable, "-c", "import m1clip.training.run"], check=True)
    return {"import_seconds": time.time() - begin}


def train(job: dict[str, Any]) -> dict[str, Any]:
    """Train for what the imports leave of the clock, and stop when the last step is saved or time is up."""
    begin, run, seconds = time.time(), Path(job["out"]) / "run", job["seconds"]
    minutes = (seconds * (1 - RESERVE) - job["probe"]["import_seconds"]) / 60
    if minutes <= 0:
        raise SystemExit(f"m1clip: its imports alone take {job['probe']['import_seconds']:.0f} s")
    duration = ("--steps", "4") if job["quick"] else ("--minutes", f"{minutes:.4f}")
    deadline = begin + seconds - max(1.0, STOPPING * seconds)
    process = subprocess.Popen(command(job, run, duration), env=environment(run))
    # The final report after it is no part of training.
    while process.poll() is None and not finished(run):
        time.sleep(0.2)
        if time.time() > deadline:
            break
    process.send_signal(signal.SIGINT)
    process.wait()
    return {**summary(list(read_log(run)), begin), "captions_per_image": captions_per_step(run)}


def captions_per_step(run: Path) -> int:
    """Captions of an image in one step."""
    return load_config(run / "config.toml").data.captions_per_step or 1


def finished(run: Path) -> bool:
    """Whether the last step is made and saved."""
    try:
        records = list(read_log(run))
    except OSError:
        return False
    planned = [record["steps"] for record in records if record["kind"] in ("start", "plan")]
    total = planned[-1] if planned else None
    return any(record["kind"] == "checkpoint" and record["step"] == total for record in records)


def summary(records: list[dict[str, Any]], begin: float) -> dict[str, Any]:
    """Steps, images and the validation curve from the log of a run whose process started at `begin`."""
    steps = [record for record in records if record["kind"] == "step"]
    evals = [
        record for record in records if record["kind"] == "eval" and record.get("split") == "val"
    ]
    if not steps or not evals:
        raise SystemExit(
            "m1clip made no step or no evaluation on the validation split: it needs more minutes"
        )
    batch = steps[-1]["images_per_second"] * steps[-1]["step_seconds"]
    both = ("text_to_image/recall@10", "image_to_text/recall@10")
    return {
        "steps": steps[-1]["step"],
        "images_seen": round(steps[-1]["step"] * batch),
        "images_per_second": statistics.median(record["images_per_second"] for record in steps),
        "curve": [
            [record["time"] - begin, statistics.fmean(record[way] for way in both)]
            for record in evals
        ],
    }


def encode(job: dict[str, Any]) -> dict[str, Any]:
    """Embeddings of a split by the best model of the run, and what computed them."""
    import numpy as np

    import m1clip

    rows = [json.loads(line) for line in Path(job["rows"]).read_text(encoding="utf-8").splitlines()]
    model, out = m1clip.load(Path(job["out"]) / "run", device=job["device"]), Path(job["out"])
    np.save(out / "image.npy", model.encode_image([row["image"] for row in rows]).cpu().numpy())
    np.save(
        out / "text.npy",
        model.encode_text([text for row in rows for text in row["captions"]]).cpu().numpy(),
    )
    return {
        "version": f"m1clip {m1clip.__version__}",
        "sources": [str(Path(m1clip.__file__).parent)],
    }


if __name__ == "__main__":
    job = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    answer = {"probe": probe, "train": train, "encode": encode}[sys.argv[1]](job)
    (Path(job["out"]) / f"{sys.argv[1]}.json").write_text(json.dumps(answer), encoding="utf-8")
