"""MISSION 18: the gradient norm of each layer; vanishing and exploding are named."""

from pathlib import Path

from monitor.made_runs import analysis, evaluation, make_run, step
from small_run import finished_run, prepared, small_config

from m1clip.monitor.diagnostics import diagnose
from m1clip.monitor.history import History
from m1clip.monitor.report import write_report
from m1clip.runlog import read_log
from m1clip.training.step_analyses import layer_grad_norms


def test_gradient_norms_of_layers_are_measured(tmp_path: Path) -> None:
    run = finished_run()
    (record,) = [line for line in read_log(run) if line["kind"] == "analysis"]
    norms = record["layer_grad_norms"]
    assert {"image/block 1", "text/block 2", "image/head", "scale"} <= norms.keys()
    assert "Gradient norm by layer" in write_report([run], tmp_path / "report.html").read_text()
    inputs = prepared(small_config())
    norms_of_views: list[dict[str, float]] = []
    for batch in (inputs.training[0], inputs.training[1]):
        inputs.make_step().run(batch, 0, lambda view: norms_of_views.append(layer_grad_norms(view)))
    assert norms_of_views[0].keys() == norms_of_views[1].keys() == norms.keys()
    assert norms_of_views[0] != norms_of_views[1], "another batch has other gradients"


def test_vanishing_gradients_are_named(tmp_path: Path) -> None:
    healthy = [step(1), analysis(1), evaluation(1, 0.2)]
    vanishing = [step(1), analysis(1, **{"image/block 1": 1e-9}), evaluation(1, 0.2)]
    messages = [
        [
            diagnosis.message
            for diagnosis in diagnose(History(make_run(path, lines)).poll(), 0.0, "finished")
        ]
        for path, lines in ((tmp_path / "a", healthy), (tmp_path / "b", vanishing))
    ]
    named = ["gradients of the image tower vanish" in " ".join(texts) for texts in messages]
    assert named == [False, True]
