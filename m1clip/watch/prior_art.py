"""The published figures of the project that the preset `prior-art` repeats, to stand beside ours."""

from __future__ import annotations

SOURCE = (
    'the public project "M1 CLIP training" (September 2025), run on an M1 MacBook Pro with 8 GB; figures as published. '
    "Its accuracy is inside batches of 12, where chance is 8.3%, and its validation had 24 pictures."
)
PRESET = "prior-art"
# (what, its figure, where ours comes from: a key of `ours` in report_tables, or None where there is no like)
FIGURES: tuple[tuple[str, str, str | None], ...] = (
    ("time of 15 epochs", "39 min", "seconds"),
    ("one step, batch 12", "7 to 9 s", "step_seconds"),
    ("loss, first to last", "3.25 to 1.89", "loss"),
    ("accuracy inside batches of 12, validation, last", "12.5%", "in_batch"),
    ("accuracy inside batches of 12, validation, best", "14.6%", "in_batch_best"),
    ("peak memory", "3 GB", "peak"),
    ("temperature, first to last", "0.07 to 0.18", "temperature"),
    ("share of a step: data", "4.4%", "share/data"),
    ("share of a step: forward", "40%", "share/forward"),
    ("share of a step: backward", "51.3%", "share/backward"),
    ("share of a step: optimizer", "4.3%", "share/optimizer"),
    ("energy an epoch", "5,460 J (35 W)", "joules"),
)


def is_prior_art(config: dict[str, object]) -> bool:
    """A run of that job: its model, batch and pictures, whatever was named on the command line."""
    model, data, train = (config.get(name) for name in ("model", "data", "train"))
    if not (isinstance(model, dict) and isinstance(data, dict) and isinstance(train, dict)):
        return False
    return (model.get("preset"), train.get("batch"), data.get("train_count")) == ("small", 12, 216)
