"""Write the table of docs/reliability.md from docs/results/*.json: what was counted stands there, nothing else.

.venv/bin/python tests/reliability/reliability_table.py
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "reliability.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
NOT_YET = "long form not run yet"
Rows = dict[str, Any]


@dataclass(frozen=True)
class Promise:
    """A line of the table: which rows of the results it sums up, and what the peers' test is called."""

    number: str
    title: str
    test: str
    keys: tuple[str, ...]
    count: Callable[[list[dict[str, Any]]], str]
    peers: str = ""


def _sum(rows: list[dict[str, Any]], name: str) -> int:
    return int(sum(row[name] for row in rows))


PROMISES = (
    Promise(
        "1", "Kill and resume, bit for bit", "test_kill_and_resume.py",
        ("kill and resume, 0 workers", "kill and resume, 2 workers"),
        lambda rows: f"{_sum(rows, 'kills')} SIGKILLs, {_sum(rows, 'kills in the middle of an epoch')} inside "
        f"an epoch; {_sum(rows, 'steps done twice')} steps repeated",
        "kill and resume",
    ),
    Promise(
        "2", "Kill while saving", "test_kill_while_saving.py", ("kill while saving",),
        lambda rows: f"{rows[0]['kills']} SIGKILLs, {rows[0]['killed inside a save']} inside a save; a crash at each "
        f"of {rows[0]['crash points']} file operations",
    ),
    Promise(
        "3", "Damaged checkpoint", "test_damaged_checkpoint.py", ("damaged checkpoint",),
        lambda rows: f"{rows[0]['damaged']:,} damaged checkpoints of {len(rows[0]['found by kind'])} kinds",
        "damaged checkpoint",
    ),
    Promise(
        "4", "Disk full", "test_disk_full.py", ("disk full, saves",),
        lambda rows: f"{rows[0]['saves']} saves with less and less free space, "
        f"{rows[0]['of which found no room']} of them with too little",
    ),
    Promise(
        "5", "Signals", "test_signal_phases.py",
        ("signals, stepping", "signals, evaluating", "signals, saving", "signals, caching"),
        lambda rows: f"{_sum(rows, 'signals')} signals in {len(rows)} phases; slowest exit "
        f"{max(row['slowest exit in seconds'] for row in rows):.1f} s",
        "signals",
    ),
    Promise(
        "6", "Two writers", "test_two_writers.py", ("two writers",),
        lambda rows: f"{rows[0]['rounds']} rounds of {rows[0]['processes a round']} processes, holder killed each time",
    ),
    Promise(
        "7", "NaN and spikes", "training/test_recovery.py, test_nan.py", ("nan and spikes",),
        lambda rows: f"{rows[0]['runs']} runs, {rows[0]['poisoned steps']} steps with NaN",
        "nan in the data",
    ),
    Promise(
        "8", "Out of memory", "training/test_oom.py, test_tight_memory.py, training/test_oom_cuda.py",
        ("out of memory, CPU", "out of memory, CUDA"),
        lambda rows: f"{_sum(rows, 'runs')} runs out of memory, micro-batch halved {_sum(rows, 'halvings')} times; "
        f"weights differ by at most {max(row['largest relative difference'] for row in rows):.1e}",
    ),
    Promise(
        "9", "Bad data", "test_bad_data.py", ("bad data",),
        lambda rows: f"{rows[0]['shards cut']} shards cut short, {rows[0]['hanging reads']} hanging reads; 5% and "
        "20% broken files in `make test`",
        "bad data",
    ),
    Promise(
        "10", "Hostile files", "test_hostile_files.py, test_hostile_config.py", ("hostile files",),
        lambda rows: f"{rows[0]['changed files']:,} hostile weight files within {rows[0]['memory limit in MiB']} MiB; "
        f"{rows[0]['kinds of file in the fast form']} kinds in `make test`",
    ),
    Promise(
        "11", "Clock and sleep", "test_clock_jumps.py", ("clock",),
        lambda rows: f"{rows[0]['runs with a clock that jumps']} logs with a clock that jumps",
    ),
    Promise(
        "12", "Soak", "soak.py", ("soak",),
        lambda rows: f"{rows[0]['minutes']:g} minutes, {rows[0]['steps']:,} steps",
    ),
    Promise(
        "-", "Fuzzing", "test_fuzz.py", ("fuzzing",),
        lambda rows: f"{rows[0]['inputs']:,} changed files for {len(rows[0]['by reader'])} readers",
    ),
)  # fmt: skip


def line(promise: Promise, rows: Rows, peers: Rows) -> str:
    """One line of the table."""
    groups = {key: [rows[key]] if key in rows else [] for key in promise.keys}
    there = [row for group in groups.values() for row in group]
    if promise.keys and not there:
        count, result = NOT_YET, "short version passes in `make test`"
    else:
        done = [row["counts"] for row in there if row["counts"]]  # one that began and never ended has none
        count = promise.count(done) if done or not promise.keys else "-"
        result = "; ".join(dict.fromkeys(row["result"] for row in there)) or "passes in `make test`"
        if any(not row["long_form"] for row in there):
            result += " (fewer than the long form asks for)"
        if missing := [key for key, group in groups.items() if not group]:
            result += f" (not yet run: {'; '.join(missing)})"
    answers = peers.get(promise.peers, {})
    others = [told(promise.peers, answers.get(label)) for label in ("open_clip", "hugging face trainer")]
    return f"| {promise.number} | {promise.title} | `{promise.test}` | {count} | {result} | {' | '.join(others)} |"


def told(test: str, found: dict[str, Any] | None) -> str:
    """What happened to a peer, in a few words."""
    if not test or found is None:
        return "-"
    if test == "kill and resume":
        if found["exit code"]:
            return f"did not end (code {found['exit code']})"
        same = found["same bits"]
        repeat = "" if found["a repeat without kills has the same bits"] else "; nor has a repeat without kills"
        return "same bits" if same else f"other weights (largest difference {found['largest difference']:.2g}){repeat}"
    if test == "damaged checkpoint":
        return "; ".join(f"{damage}: {_damaged(each)}" for damage, each in found.items())
    if test == "signals":
        saved = "saved first" if found["saved on the way out"] else "nothing saved since the last checkpoint"
        return f"code {found['exit code']}, {saved}"
    if test == "nan in the data":
        lost = found.get("tensors that are not finite", 0)
        return f"{lost} of {found.get('tensors', 0)} tensors are not finite at the end (code {found['exit code']})"
    return f"code {found['exit code']}: {_short(found['words'])}" if found["exit code"] else "went on"


def _damaged(found: dict[str, Any]) -> str:
    return (
        f"stops (code {found['exit code']}, {_short(found['words'])})"
        if found["exit code"]
        else "continues with damaged weights"
    )


def _short(words: str) -> str:
    return "`" + words.replace("|", "/").replace("`", "'")[:70] + "`"


def table(rows: Rows, peers: Rows) -> str:
    """The whole table."""
    versions = peers.get("versions", {})
    head = f"| | promise | test | count | result | open_clip {versions.get('open_clip', '')} | HF Trainer " \
           f"{versions.get('transformers', '')} |"  # fmt: skip
    lines = [head, "|---|---|---|---|---|---|---|", *(line(promise, rows, peers) for promise in PROMISES)]
    return "\n".join([*lines, "", *measured(rows)])


def measured(rows: Rows) -> list[str]:
    """Which commit and machine the rows are from."""
    places: dict[str, list[str]] = {}
    for name, row in rows.items():
        torch = f", torch {row['torch']}" if "torch" in row else ""
        places.setdefault(f"commit `{row['commit']}` on {row['machine']}{torch}", []).append(name)
    several = len(places) > 1
    return [f"- Counted with {place}{': ' + '; '.join(names) if several else ''}." for place, names in places.items()]


def main() -> None:
    """Put the table between its marks."""
    found = []
    for name in ("reliability.json", "reliability_peers.json"):
        path = DOCS / "results" / name
        found.append(json.loads(path.read_text()) if path.exists() else {})
    made = table(found[0], found[1])
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{made}\n{END}{after}", encoding="utf-8")
    print(made)


if __name__ == "__main__":
    main()
