"""The measuring process: one JSON request a line on its input, one JSON answer a line on its output.

A process of its own, because peak memory, thread counts and a broken kernel all belong to a process.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

from m1clip.errors import UserError


def main() -> None:
    """Answer until the input ends. Whatever libraries print goes to the error stream, not among the answers."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    from m1clip.bench.candidate import Candidate
    from m1clip.bench.workload import Workload, probe_device
    from m1clip.hardware.facts import read_facts

    facts = read_facts()
    workload = Workload(facts)
    commands = {
        "open": lambda ask: workload.open(Candidate(**ask["candidate"]), ask["images"]),
        "steps": lambda ask: workload.steps(ask["count"], ask["seconds"]),
        "memory": lambda ask: workload.memory(),
        "parity": lambda ask: workload.parity(),
        "probe": lambda ask: probe_device(ask["device"], facts, ask["precisions"], ask["compile"], ask["budget"]),
        "facts": lambda ask: facts.to_dict(),
    }
    for line in sys.stdin:
        ask = json.loads(line)
        answers.write(json.dumps(_answer(commands[ask["do"]], ask)) + "\n")


def _answer(command: Any, ask: dict[str, Any]) -> dict[str, Any]:
    """The answer, or what went wrong in a word (memory, user, other) and a line."""
    import torch

    try:
        return {"ok": command(ask)}
    except (torch.OutOfMemoryError, MemoryError) as error:
        torch.cuda.empty_cache()
        return {"error": "memory", "line": _first_line(error)}
    except UserError as error:
        return {"error": "user", "line": str(error)}
    except Exception as error:  # noqa: BLE001  one candidate that fails must not end the comparison
        traceback.print_exc()
        short = "memory" if "out of memory" in str(error).lower() else "other"
        return {"error": short, "line": _first_line(error)}


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:300]


if __name__ == "__main__":
    main()
