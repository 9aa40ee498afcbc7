"""The speedrun: recall on Flickr8k from random weights against a fixed clock. Rules and table: docs/speedrun.md.

python benchmarks/speedrun.py DATA --entry m1clip                    # three seeds, appended to the
log python benchmarks/speedrun.py DATA --entry m1clip --options '--lr 1e-3'   # a trial: validation
only, not logged
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from sides import RESULTS, machine, variables_for, write

from m1clip.data.captions import caption_ids_of
from m1clip.data.sources import open_sources
from m1clip.evaluation.retrieval import retrieval

LOG, PAGE = RESULTS / "speedrun.json", RESULTS.parent / "speedrun.md"
MARKS = ("<!-- table -->\n", "<!-- end of table -->\n")
RECALLS = tuple(
    f"{way}/recall@{k}" for way in ("text_to_image", "image_to_text") for k in (1, 5, 10)
)
OVERTIME = 1.25  # a run that takes longer than this many clocks is killed


class Track(NamedTuple):
    """A clock and the machine that it is for."""

    seconds: float
    device: str
    words: str


class Entry(NamedTuple):
    """A script with the actions probe, train and encode, and its options."""

    track: str
    script: str
    options: str
    words: str


TRACKS = {
    "cpu": Track(600, "cpu", "two CPU cores, ten minutes"),
    "gpu": Track(120, "cuda", "one GPU, two minutes"),
}
M1CLIP, OPEN_CLIP = "entry_m1clip.py", "peers/open_clip_entry.py"
MUON = (
    "--opt timm/muon --lr 1.5e-3 --wd 0.1 --opt-kwargs fallback_lr_scale=0.5 "
    "--batch-size 128 --aug-cfg scale=(0.5,1.0)"
)
ADAMW = "--recipe scratch --optimizer adamw --lr 1e-3"
ENTRIES = {
    "m1clip": Entry("cpu", M1CLIP, "--recipe scratch", "m1clip's defaults"),
    "m1clip-adamw": Entry("cpu", M1CLIP, ADAMW, "m1clip with AdamW for all weights"),
    "open_clip-muon": Entry("cpu", OPEN_CLIP, MUON, "open_clip's trainer with timm's Muon"),
    "open_clip-adamw": Entry(
        "cpu", OPEN_CLIP, "--lr 1e-3 --wd 0.1 --batch-size 256", "open_clip's trainer, AdamW"
    ),
    "m1clip-gpu": Entry("gpu", M1CLIP, "--recipe scratch", "m1clip's defaults"),
    "open_clip-muon-gpu": Entry("gpu", OPEN_CLIP, MUON, "open_clip's trainer with timm's Muon"),
}


def main() -> None:
    """Run the entries with every seed and write the log after each run."""
    options = parse()
    if options.add:
        record(json.loads(options.add.read_text(encoding="utf-8"))["runs"], LOG)
        return
    if options.data is None or not options.entry:
        lines = [
            f"{name:20} {TRACKS[entry.track].words}: {entry.words}"
            for name, entry in ENTRIES.items()
        ]
        raise SystemExit("\n".join(["give DATA and --entry NAME:", *lines]))
    trial = bool(options.options or options.minutes or options.quick)
    log = options.json or (None if trial else LOG)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        data_hash = write_splits(options.data, folder)
        probes: dict[str, Any] = {}
        for seed in options.seeds:  # the outer loop: a slow hour of the machine affects all entries
            for name in options.entry:
                run = run_entry(name, seed, options, folder, probes, trial)
                run |= {"data": Path(options.data).resolve().name, "data_hash": data_hash}
                shown = "val" if trial else "test"
                print(
                    f"{run['entry']}, seed {seed}: {run['images_seen']:,} images seen in"
                    f" {run['seconds']:.0f} s, {shown} recall@10"
                    f" {100 * recall_at_10(run[shown]):.1f}",
                    flush=True,
                )
                if log:
                    record([run], log)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "data",
        nargs="?",
        help="a folder that m1clip train accepts, with train, val and test splits",
    )
    parser.add_argument(
        "--entry",
        action="append",
        default=[],
        choices=ENTRIES,
        metavar="NAME",
        help="may be repeated",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--options", default="", help="more options for the trainer: a trial, scored on validation"
    )
    parser.add_argument("--minutes", type=float, help="another clock: a trial")
    parser.add_argument("--quick", action="store_true", help="a few steps: a smoke test")
    parser.add_argument(
        "--peer-python",
        default=os.environ.get("PEERS"),
        help="a Python with open_clip; default $PEERS",
    )
    parser.add_argument(
        "--json", type=Path, help=f"the log; default {LOG.name} in docs/results, none for a trial"
    )
    parser.add_argument(
        "--add", type=Path, help="append the runs of another log, of another machine"
    )
    parser.add_argument("--keep", type=Path, help="keep the folders of the runs here")
    return parser.parse_args()


def write_splits(data: str, folder: Path) -> str:
    """FOLDER/data.jsonl with train and val, for training, and one file per split.

    Returns their hash.
    """
    source = open_sources((data,))
    if missing := {"train", "val", "test"} - set(source.splits()):
        raise SystemExit(
            f"{data}: has no {', '.join(sorted(missing))} split; a speedrun needs train, val and"
            " test"
        )
    digest, visible = hashlib.sha256(), ""
    for split in ("train", "val", "test"):
        rows = [(Path(str(s.image)).resolve(), list(s.captions)) for s in source.samples(split)]
        digest.update(
            json.dumps([split, sorted((image.name, texts) for image, texts in rows)]).encode()
        )
        lines = [
            json.dumps({"image": str(image), "captions": texts, "split": split}) + "\n"
            for image, texts in rows
        ]
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
        visible += "" if split == "test" else "".join(lines)
    (folder / "data.jsonl").write_text(visible, encoding="utf-8")
    return digest.hexdigest()[:12]


def run_entry(
    name: str,
    seed: int,
    options: argparse.Namespace,
    folder: Path,
    probes: dict[str, Any],
    trial: bool,
) -> dict[str, Any]:
    """Probe the speed (once per entry), train against the clock, encode and score."""
    entry = ENTRIES[name]
    track, script = TRACKS[entry.track], Path(__file__).parent / entry.script
    seconds = 60 * options.minutes if options.minutes else track.seconds
    python = sys.executable
    if entry.script.startswith("peers/"):
        if not options.peer_python:
            raise SystemExit(
                f"{name} needs --peer-python PYTHON, a Python with open_clip (benchmarks/README.md)"
            )
        python = options.peer_python
    out = folder / f"{name}-seed{seed}"
    out.mkdir()
    job = {
        **{
            "data": str(folder / "data.jsonl"),
            "out": str(out),
            "seed": seed,
            "seconds": seconds,
            "quick": options.quick,
        },
        **{"device": "cpu" if options.quick else track.device},
        "options": [*shlex.split(entry.options), *shlex.split(options.options)],
    }
    cores = limit_cores(2) if entry.track == "cpu" else os.cpu_count()

    def act(action: str, limit: float | None = None, **more: Any) -> Any:
        return run_action([python, str(script), action], out, {**job, **more}, limit)

    if name not in probes:
        probes[name] = act("probe")
    begin = time.time()
    told = act("train", limit=OVERTIME * seconds, probe=probes[name])
    run: dict[str, Any] = {
        **{
            "entry": f"{name} {options.options}".strip(),
            "track": entry.track,
            "seed": seed,
            "clock": seconds,
        },
        **{"seconds": time.time() - begin, "date": time.strftime("%Y-%m-%d", time.gmtime(begin))},
        **{"options": job["options"], "machine": {**machine(), "cores": cores}, **told},
    }
    # The test split decides nothing, so a trial does not see it.
    for split in ("val",) if trial else ("val", "test"):
        rows = folder / f"{split}.jsonl"
        made = act("encode", rows=str(rows))
        run[split] = score(rows, out)
    sources = [script, *(file for source in made["sources"] for file in Path(source).rglob("*.py"))]
    return {**run, "version": made["version"], "source_hash": source_hash(sources)}


def run_action(words: list[str], out: Path, job: dict[str, Any], limit: float | None) -> Any:
    """Run one action of an entry in a process group of its own; returns the JSON that it wrote."""
    action, variables = words[-1], variables_for(words[0])
    (out / "job.json").write_text(json.dumps(job), encoding="utf-8")
    with (out / f"{action}.log").open("w+", encoding="utf-8") as output:
        process = subprocess.Popen(
            [*words, str(out / "job.json")],
            stdout=output,
            stderr=output,
            env=variables,
            start_new_session=True,
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = f"nothing within {limit:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        if code:
            output.seek(0)
            raise SystemExit(f"{' '.join(words)} ended with {code}:\n{output.read()[-3000:]}")
    return json.loads((out / f"{action}.json").read_text(encoding="utf-8"))


def limit_cores(count: int) -> int:
    """Restrict this process and those that it starts to `count` cores, where the system can."""
    if not hasattr(os, "sched_setaffinity"):
        return os.cpu_count() or 1
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])
    return len(os.sched_getaffinity(0))


def score(rows: Path, out: Path) -> dict[str, float]:
    """The six recalls of the embeddings in OUT."""
    captions = [
        json.loads(line)["captions"] for line in rows.read_text(encoding="utf-8").splitlines()
    ]
    image, text = (_units(np.load(out / f"{side}.npy")) for side in ("image", "text"))
    image_index = np.array([index for index, texts in enumerate(captions) for _ in texts])
    keys = caption_ids_of([caption for texts in captions for caption in texts])
    metrics = dict(retrieval(image, text, image_index, keys))
    return {name: float(metrics[name]) for name in RECALLS}


def _units(vectors: np.ndarray) -> np.ndarray:
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def source_hash(files: Iterable[Path]) -> str:
    """A hash of the contents of files, whatever folder they are in."""
    contents = sorted(hashlib.sha256(file.read_bytes()).hexdigest() for file in files)
    return hashlib.sha256("".join(contents).encode()).hexdigest()[:12]


def recall_at_10(recalls: dict[str, float]) -> float:
    """The mean of both directions."""
    return (recalls["text_to_image/recall@10"] + recalls["image_to_text/recall@10"]) / 2


def record(runs: list[dict[str, Any]], log: Path) -> None:
    """Append runs to a log; the table of docs/speedrun.md follows the log in docs/results."""
    before = json.loads(log.read_text(encoding="utf-8"))["runs"] if log.exists() else []
    write(log, {"runs": [*before, *runs]})
    if log == LOG:
        head, _, rest = PAGE.read_text(encoding="utf-8").partition(MARKS[0])
        PAGE.write_text(
            head + MARKS[0] + table([*before, *runs]) + MARKS[1] + rest.partition(MARKS[1])[2],
            encoding="utf-8",
        )


def groups(runs: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Runs of the same entry, source, data and machine, best first within each track and data."""
    runs_by_key: dict[Any, list[dict[str, Any]]] = {}
    for run in (run for run in runs if "test" in run):  # not a trial
        key = (run["entry"], run["source_hash"], run["data"], run["track"], processor(run))
        runs_by_key.setdefault(key, []).append(run)

    def rank(group: list[dict[str, Any]]) -> tuple[Any, ...]:
        track_rank = list(TRACKS).index(group[0]["track"])
        return track_rank, group[0]["data"], over(group), -statistics.fmean(recalls(group, "test"))

    return sorted(runs_by_key.values(), key=rank)


def processor(run: dict[str, Any]) -> str:
    """The processor that the track limits."""
    return str(run["machine"]["cuda" if run["track"] == "gpu" else "cpu"])


def over(runs: list[dict[str, Any]]) -> bool:
    """Whether a run took longer than the clock: it is shown, but not ranked."""
    return any(run["seconds"] > run["clock"] for run in runs)


def recalls(runs: list[dict[str, Any]], split: str) -> list[float]:
    """Recall@10 of each run, in percent."""
    return [100 * recall_at_10(run[split]) for run in runs]


def mean_spread(values: Sequence[float], form: str = ".1f") -> str:
    """`17.5 ± 0.4`: mean and standard deviation over seeds; one seed has none."""
    mean = f"{statistics.fmean(values):{form}}"
    return f"{mean} ± {statistics.stdev(values):{form}}" if len(values) > 1 else mean


def images_seen(runs: list[dict[str, Any]]) -> str:
    """Images seen in training, and the captions of each if there are several."""
    captions = runs[0]["captions_per_image"]
    images = f"{statistics.fmean(run['images_seen'] for run in runs):,.0f}"
    return images + (f" x {captions} captions" if captions > 1 else "")


def table(runs: Sequence[dict[str, Any]]) -> str:
    """The leaderboard as markdown: one table per track and data."""
    lines = []
    for (track, data), ranked in itertools.groupby(
        groups(runs), lambda group: (group[0]["track"], group[0]["data"])
    ):
        ranked_groups = list(ranked)
        lines += [
            "",
            f"**{TRACKS[track].words}, {data}** (data {ranked_groups[0][0]['data_hash']})",
            "",
        ]
        lines += [
            "| | entry | test recall@10 | recall@1 | minutes | images seen | seeds | machine |"
            " source |"
        ]
        lines += [
            "|---" * 9 + "|",
            *(row(rank, group) for rank, group in enumerate(ranked_groups, 1)),
            *catching_up(ranked_groups),
        ]
    return "\n".join([*lines, "", ""])


def row(rank: int, group: list[dict[str, Any]]) -> str:
    """One entry as a line of the table."""
    first, late = group[0], over(group)
    where = first["machine"]
    cells = [
        *(
            "-" if late else str(rank),
            f"`{first['entry']}`",
            f"**{mean_spread(recalls(group, 'test'))}**",
        ),
        (
            f"{statistics.fmean(50 * (run['test'][RECALLS[0]] + run['test'][RECALLS[3]]) for run in group):.1f}"
        ),
        mean_spread([run["seconds"] / 60 for run in group], ".2f")
        + (" (over the clock)" if late else ""),
        *(images_seen(group), ", ".join(str(run["seed"]) for run in group)),
        f"{processor(first)}, {where['cores']} cores",
        f"{first['version']}, {first['source_hash']}, commit {where['commit']}, {first['date']}",
    ]
    return f"| {' | '.join(cells)} |"


def catching_up(ranked: list[list[dict[str, Any]]]) -> list[str]:
    """When the best entry of m1clip passes the final validation recall of the best peer on the same processor."""
    peers = [group for group in ranked if group[0]["entry"].startswith("open_clip")]
    pairs = [
        (g, p)
        for g in ranked
        if g not in peers
        for p in peers
        if processor(g[0]) == processor(p[0])
    ]
    if not pairs:
        return []
    own, peer = pairs[0]
    target = statistics.fmean(recalls(peer, "val"))
    times = [
        next((t / 60 for t, recall in run["curve"] if 100 * recall >= target), None) for run in own
    ]
    reached = [t for t in times if t is not None]
    when = (
        f"after {mean_spread(reached)} minutes"
        if len(reached) == len(times)
        else f"in {len(reached)} of {len(times)} runs"
    )
    who, whom = own[0]["entry"], peer[0]["entry"]
    return [
        "",
        f"On validation, `{who}` reaches the final recall@10 of `{whom}` ({target:.1f}) {when}.",
    ]


if __name__ == "__main__":
    main()
