"""MISSION 21: memory by component.

`benchmarks/memory.py --components` measures the rest, in fresh processes.
"""

from small_run import finished_run

from m1clip.monitor.history import History
from m1clip.monitor.resources import memory_table


def test_run_reports_memory_by_component() -> None:
    one = History(finished_run({"train.eval_every": 5})).poll()
    chunks = History(finished_run({"train.eval_every": 5, "train.micro_batch": 4})).poll()
    for history in (one, chunks):
        assert history.memory["rest"] < history.memory["peak"]  # which other tests have raised
        names = [name for name, _ in memory_table(history)]
        for name in ("weights", "gradients", "optimizer", "activations", "data", "caches", "peak"):
            assert name in names
    assert chunks.memory["activations"] < one.memory["activations"]
