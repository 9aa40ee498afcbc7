"""The results as a table for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from m1clip.evaluate.metric import Metric, Scores

if TYPE_CHECKING:
    from rich.table import Table


def scores_table(scores: Scores, title: str | None = None) -> Table:
    """A rich table: each metric with its 95% interval, the level of chance and n."""
    # Imported here: a training run without a terminal needs the scores and not the table.
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("metric", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True, style="bold")
    table.add_column("95% interval", justify="right", no_wrap=True)
    table.add_column("chance", justify="right", no_wrap=True)
    table.add_column("n", justify="right", no_wrap=True)
    group = None
    for metric in scores.metrics:
        head = metric.name.split("/")[0]
        if group is not None and head != group:
            table.add_section()
        group = head
        # Text and not markup: a label such as "[red]" from a person's data is shown as it is.
        table.add_row(*(Text(cell) for cell in (metric.label, *cells(metric))))
    return table


def cells(metric: Metric) -> tuple[str, str, str, str]:
    """Value, interval, chance and n in words."""
    low, high = metric.interval.low, metric.interval.high
    if metric.kind == "rank":
        return f"{metric.value:g}", f"{low:g} - {high:g}", f"{metric.chance:g}", f"{metric.n:,}"
    interval = f"{100 * low:.1f} - {100 * high:.1f}%"
    # Chance needs more digits than the value: 1 of 5,000 must not read as 0.0%.
    return f"{100 * metric.value:.1f}%", interval, f"{100 * metric.chance:.3g}%", f"{metric.n:,}"
