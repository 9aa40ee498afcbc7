"""The table of analyses that a run makes of itself at every evaluation.

An analysis is one entry of `ANALYSES` and one function of what it needs. The rest follows from the
entry: the loop hands out gradients when they are due, the log is validated, and the page, the
report, `m1clip eval --analysis` and the docs show it. Functions are given as "module:function" and
imported where they are called, so that programs that read a log do not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal

from m1clip.log_field import LogField, figure

# What the function of an analysis takes: "step": a `training.step_analyses.StepView`, the gradients and
# weights of the step before the evaluation, on all ranks; "features": the
# `inference.features.SplitFeatures` of the evaluated split, on rank 0; "split": an
# `evaluation.evaluate.Evaluator` (model, source, samples) and the features, on rank 0; "nothing":
# no argument, on rank 0.
Need = Literal["step", "features", "split", "nothing"]
# "curve": a number; "curves": a dict of numbers or of rates (`RATE`), one curve each, rates also as
# a table in the report and in `eval --analysis`; "heat map": a dict of positive numbers, rows over
# evaluations on a logarithmic scale, and a table in the report.
Display = Literal["curve", "curves", "heat map"]
# The schema of a fraction with its 95% interval, its chance level and the number of trials.
RATE = {"value": float, "low": float, "high": float, "chance": float, "n": int}
# Kind of record with the values of "step" and "nothing"; also the field of "eval" with the others.
RECORD = "analysis"


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """One analysis: what it needs, how it is computed, and how its value is logged and shown."""

    name: str  # of its value in the log
    needs: Need
    function: str  # "module:function"
    schema: Any  # of its value, for `matches_schema`; `figure` for a number that may be NaN
    meaning: str  # what the value means, in one line
    parts: Mapping[str, str] = field(default_factory=dict)  # what the parts of "curves" mean
    shown_as: Display
    title: str  # of its plot; analyses with the same title share one
    label: str = ""  # of its curve
    factor: float = 1.0  # from the log to the unit of the plot
    unit: str = ""  # after a value on the page
    report_title: str = ""  # of its curve in the report; empty: none
    report_part: str = ""  # for "curves": the one that is in the report
    # "module:function" of the values so far, a list of (step, value) with at least one, and the
    # `monitor.history.History` of the run (learning rates, evaluations, config) -> list of problems,
    # one sentence each, shown as warnings. It belongs in m1clip/monitor, without torch.
    verdict: str = ""

    @property
    def record_kind(self) -> str:
        """The kind of record that has the value."""
        return "eval" if self.needs in ("features", "split") else RECORD

    @property
    def has_rates(self) -> bool:
        """Whether the value is a dict of rates."""
        return bool(self.schema == {str: RATE})

    @property
    def path(self) -> str:
        """Where the value is in its record."""
        return f"{RECORD}/{self.name}" if self.record_kind == "eval" else self.name

    def compute(self, *needed: Any) -> Any:
        """Compute the value from what the analysis needs."""
        return load_function(self.function)(*needed)

    def problems(self, values: Sequence[tuple[int, Any]], history: Any) -> list[str]:
        """Judge the values (step, value) of a run; [] without a problem, a rule or a value."""
        if not (self.verdict and values):
            return []
        problems: list[str] = load_function(self.verdict)(values, history)
        return problems

    def log_fields(self) -> list[LogField]:
        """List the fields of the log that come from this analysis."""
        if self.record_kind == RECORD:
            return [LogField(name=self.name, schema=self.schema)]
        if not self.report_title:
            return []
        part = f"/{self.report_part}" if self.report_part else ""
        return [
            LogField(
                name=f"{self.path}{part}",
                schema=None,  # checked as a part of its field
                curve="eval",
                title=self.report_title,
                factor=self.factor,
            )
        ]


def load_function(path: str) -> Callable[..., Any]:
    """Import "module:function"."""
    module, _, name = path.partition(":")
    function: Callable[..., Any] = getattr(import_module(module), name)
    return function


GEOMETRY_TITLE = "Alignment, uniformity, modality gap"

# In the order in which they are shown.
ANALYSES = {
    analysis.name: analysis
    for analysis in (
        Analysis(
            name="held_out_batch_accuracy",
            needs="split",
            function="m1clip.evaluation.split_analyses:held_out_batch_accuracy",
            schema={str: RATE},
            meaning=(
                "how often an image is closest to its own caption among those of a batch as in"
                " training: chance is 1 / batch size, so values of different batch sizes cannot be"
                " compared"
            ),
            shown_as="curves",
            title="Validation accuracy within a batch, % (not comparable between batch sizes)",
            factor=100.0,
            unit="%",
        ),
        Analysis(
            name="category_recall",
            needs="split",
            function="m1clip.evaluation.split_analyses:category_recall",
            schema={str: RATE},
            meaning="mean recall of the images of each category, among all images and captions",
            shown_as="curves",
            title="Mean recall by category, %",
            factor=100.0,
            unit="%",
        ),
        Analysis(
            name="difficulty",
            needs="features",
            function="m1clip.evaluation.split_analyses:difficulty",
            schema={str: RATE},
            meaning="how often an image scores its caption above another, by how similar they are",
            parts={
                "easy": "the lower half by similarity",
                "medium": "the middle",
                "hard": "the top tenth",
            },
            shown_as="curves",
            title="Accuracy by similarity of the wrong caption, %",
            factor=100.0,
            unit="%",
            report_title="Accuracy against similar captions, %",
            report_part="hard",
        ),
        Analysis(
            name="scene_difficulty",
            needs="split",
            function="m1clip.evaluation.split_analyses:scene_difficulty",
            schema={str: RATE},
            meaning="synthetic images: how often an image scores its caption above another, "
            "by what the other describes",
            parts={
                "easy": "an image of another category",
                "medium": "another image of the same category",
                "hard": "the same image with one attribute changed",
            },
            shown_as="curves",
            title="Accuracy by meaning of the wrong caption, %",
            factor=100.0,
            unit="%",
        ),
        Analysis(
            name="alignment",
            needs="features",
            function="m1clip.evaluation.split_analyses:mean_alignment",
            schema=figure,
            meaning="distance between a caption and its image: 0 is perfect, 2 unrelated",
            shown_as="curve",
            title=GEOMETRY_TITLE,
            label="alignment",
        ),
        Analysis(
            name="uniformity_image",
            needs="features",
            function="m1clip.evaluation.split_analyses:uniformity_image",
            schema=figure,
            meaning="how evenly images spread: 0 means collapsed, lower is better",
            shown_as="curve",
            title=GEOMETRY_TITLE,
            label="uniformity of images",
        ),
        Analysis(
            name="uniformity_text",
            needs="features",
            function="m1clip.evaluation.split_analyses:uniformity_text",
            schema=figure,
            meaning="how evenly captions spread",
            shown_as="curve",
            title=GEOMETRY_TITLE,
            label="uniformity of captions",
        ),
        Analysis(
            name="modality_gap",
            needs="features",
            function="m1clip.evaluation.split_analyses:mean_modality_gap",
            schema=figure,
            meaning="distance between the mean image and the mean caption",
            shown_as="curve",
            title=GEOMETRY_TITLE,
            label="modality gap",
            report_title="Modality gap",
        ),
        Analysis(
            name="layer_grad_norms",
            needs="step",
            function="m1clip.training.step_analyses:layer_grad_norms",
            schema={str: figure},
            meaning="norm of the gradient of each layer, before clipping",
            shown_as="heat map",
            title="Gradient norm by layer",
            verdict="m1clip.monitor.layer_gradients:judge_gradients",
        ),
    )
}


def analyses_that_need(need: Need) -> list[Analysis]:
    """List the analyses with one kind of input, in the order of the table."""
    return [analysis for analysis in ANALYSES.values() if analysis.needs == need]


def analyses_of_evaluations() -> list[Analysis]:
    """List the analyses whose value is in the record of an evaluation."""
    return [analysis for analysis in ANALYSES.values() if analysis.record_kind == "eval"]
