"""MISSION 11: the effect of threads and of worker processes is measured."""

from machines import M1, XEON

from m1clip.bench.compare import CompareOptions, configurations
from m1clip.bench.loading import measure_loading, worker_counts
from m1clip.bench.report import loading_rows
from m1clip.hardware.machine_info import read_machine_info


def test_compare_tries_all_cores_performance_cores_and_half() -> None:
    candidates = configurations(M1, CompareOptions(), ["cpu"])
    default = M1.performance_cores
    assert {c.threads or default for c in candidates} == {M1.cores, default, default // 2}
    assert worker_counts(XEON) == [0, 4, 8, 16]


def test_loading_is_measured_for_each_number_of_workers() -> None:
    loadings = measure_loading(read_machine_info(gpu=False), (0, 1), rounds=1, images=8)
    assert [loading.workers for loading in loadings] == [0, 1]
    rates = [loading.images_per_second.median for loading in loadings]
    assert min(rates) > 0
    assert rates[0] != rates[1]
    assert [row[0] for row in loading_rows(loadings)] == ["none", "1"]
