"""`m1clip report`: one self-contained HTML file about a run."""

import base64
import importlib.util
import io
import itertools
import json
import shlex
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from PIL import Image

from m1clip.analyses import ANALYSES
from m1clip.epochs import NOT_COMPARABLE, PHASE_HEAD
from m1clip.errors import UserError
from m1clip.formatting import clock, duration, number, one_line, percent, size
from m1clip.io import read_small, write_bytes
from m1clip.log_field import LogField
from m1clip.monitor.diagnostics import diagnose
from m1clip.monitor.history import PHASES, History, numbers
from m1clip.monitor.resources import (
    Rows,
    core_table,
    energy_rows,
    heat_rows,
    memory_table,
    stage_note,
    stage_seconds,
)
from m1clip.monitor.status import elapsed, status_of
from m1clip.runlog import SELECTION, label, plotted_fields
from m1clip.time_use import describe as describe_time

GRID_WIDTH = 1000  # pixels of the retrieval grid; a wider one is scaled down
PLOT_COLORS, PLOT_GRAY = (
    ("#0b8ba3", "#e8590c", "#7d5fff", "#2f9e44", "#d6336c", "#b58100", "#1c7ed6"),
    "#868e96",
)
CHANCE = "chance"
NOT_COMPARABLE_LOSSES = (
    "The losses of these runs cannot be compared: their batch sizes or loss functions differ."
)
WIDE_LOG_RANGE = 30.0  # the highest value divided by the lowest
PLOT_INK = "#76818f"  # text of a plot: readable on white and on the dark theme
NO_PLOTS = "plots need matplotlib: pip install 'm1clip[plot]'"


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]], css: str = "values") -> str:
    """A horizontally scrollable table; cells are escaped here."""
    top = "".join(f"<th scope='col'>{escape(cell)}</th>" for cell in head)
    body = ""
    for first, *rest in rows:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in rest)
        body += f"<tr><th scope='row'>{escape(first)}</th>{cells}</tr>"
    return (
        "<div class='scroll'><table"
        f" class='{css}'><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def html_image(data: bytes, kind: str, alt: str, css: str = "") -> str:
    source = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    return f"<img class='{css}' alt='{escape(alt, quote=True)}' src='{source}'>"


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>" if body else ""


def has_matplotlib() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def plot(
    title: str,
    curves: Sequence[tuple[str, Sequence[tuple[float, float]]]],
    log: bool = False,
    *,
    x_label: str = "step",
    log_x: bool = False,
    reference: str = CHANCE,
    dashed: Mapping[str, str] | None = None,
    note: str = "",
) -> str:
    """A line plot of (name, points), drawn by matplotlib as SVG; "" if nothing was measured.

    The curve with the name `reference` is dashed and gray; those in `dashed` are dashed in the
    color given there. `note` stands below the plot.
    """
    shown = [(name, points) for name, points in curves if points]
    if not shown:
        return ""
    dashed = {reference: PLOT_GRAY, **(dashed or {})}
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    inks = dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), PLOT_INK
    )
    settings = {
        "font.size": 8,
        "svg.fonttype": "none",
        "axes.axisbelow": True,
        "text.parse_math": False,
    }
    buffer = io.BytesIO()
    with rc_context({**inks, **settings}):
        figure = Figure(figsize=(4.6, 2.5), layout="constrained")
        axes = figure.add_subplot()
        axes.spines[["top", "right"]].set_visible(False)
        for (name, points), color in zip(shown, itertools.cycle(PLOT_COLORS), strict=False):
            xs, ys = zip(*points, strict=True)
            style: dict[str, Any] = (
                {"color": dashed[name], "linestyle": "--"} if name in dashed else {"color": color}
            )
            axes.plot(
                xs, ys, label=one_line(name), marker="o" if len(xs) < 30 else None, ms=2.5, **style
            )
        heights = [y for _, points in shown for _, y in points]
        # A logarithmic axis has no place for a loss at or below 0.
        if log and min(heights) > 0:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(lambda value, _: number(value))
            is_wide = max(heights) > WIDE_LOG_RANGE * min(heights)
            # Labels between powers of ten would overlap on a wide range.
            minor = (lambda value, _: "") if is_wide else (lambda value, _: number(value))
            axes.yaxis.set_minor_formatter(minor)
        if log_x:
            axes.set_xscale("log")
            axes.set_xticks(sorted({x for _, points in shown for x, _ in points}))
            axes.xaxis.set_major_formatter(lambda value, _: number(value))
            axes.xaxis.set_minor_formatter(lambda value, _: "")
        axes.grid(alpha=0.25)
        axes.set_xlabel(x_label)
        if len(shown) > 1:
            axes.legend(frameon=False)
        with warnings.catch_warnings():
            # A letter of a name that the font does not have.
            warnings.simplefilter("ignore", UserWarning)
            figure.savefig(buffer, format="svg", transparent=True)
    alt = "; ".join(
        f"{name} from {number(points[0][1])} to {number(points[-1][1])}" for name, points in shown
    )
    image = html_image(buffer.getvalue(), "svg+xml", f"{title}: {alt}")
    hint = f"<p class='hint'>{escape(note)}</p>" if note else ""
    return f"<figure class='card'><figcaption>{escape(title)}</figcaption>{image}{hint}</figure>"


def curve_plots(histories: Sequence[History]) -> str:
    """Loss, scores, speed and everything else that was measured, one curve per run."""
    metrics = " or ".join(dict.fromkeys(SELECTION[h.metric] for h in histories)).capitalize()
    best_title = f"{metrics} on validation, % (selects the best model)"
    # The metric depends on the run.
    best = LogField(name="", curve="eval", title=best_title, factor=100.0)
    loss, *other_fields = plotted_fields("step")
    plots = ""
    for field in (loss, best, *plotted_fields("eval"), *other_fields):
        drawn = [
            history
            for history in histories
            if history.curve(field.name or history.metric, field.factor)
        ]
        curves = [
            (history.name, history.curve(field.name or history.metric, field.factor))
            for history in drawn
        ]
        chances = chance_curves(drawn, field)
        plots += plot(
            field.title,
            [*curves, *((name, points) for name, points, _ in chances)],
            log=field.log_scale,
            dashed={name: color for name, _, color in chances},
            note=NOT_COMPARABLE_LOSSES if field is loss and have_different_losses(drawn) else "",
        )
    return plots


def chance_curves(
    histories: Sequence[History], field: LogField
) -> list[tuple[str, Sequence[tuple[float, float]], str]]:
    """(name, points, color) of each chance level of a field; in gray if all runs have the same."""
    runs_by_level: dict[float, list[int]] = {}
    curves = []
    for index, history in enumerate(histories):
        points = history.curve(
            field.chance or f"{field.name or history.metric}/chance", field.factor
        )
        curves.append(points)
        if points:
            runs_by_level.setdefault(points[-1][1], []).append(index)
    chances: list[tuple[str, Sequence[tuple[float, float]], str]] = []
    for indices in runs_by_level.values():
        names = ", ".join(histories[index].name for index in indices)
        longest = max((curves[index] for index in indices), key=len)
        color = PLOT_COLORS[indices[0] % len(PLOT_COLORS)]
        chances.append((f"{CHANCE} of {names}", longest, color))
    if len(chances) == 1:
        return [(CHANCE, chances[0][1], PLOT_GRAY)]
    return chances


def have_different_losses(histories: Sequence[History]) -> bool:
    """Whether runs have different batch sizes or loss functions."""
    settings = {
        (
            history.files.setting("train", "batch_size", int),
            history.files.setting("train", "loss", str),
        )
        for history in histories
    }
    return len(settings) > 1


Scores = tuple[str, dict[str, Any]]  # what was evaluated and when, and its record; {} without one


def final_scores(history: History) -> Scores:
    """The final scores: of the test split if the run has finished, else of its best evaluation."""
    if history.end:
        return f"{_split(history.end)} split, after training", history.end
    return best_scores(history)


def best_scores(history: History) -> Scores:
    """The scores of the best evaluation during training."""
    best = history.best()
    if not best:
        return "no evaluation yet", {}
    so_far = "" if history.end else " so far"
    return f"{_split(best)} split, best evaluation{so_far} (step {best['step']:,})", best


def _split(record: dict[str, Any]) -> str:
    """The split that the scores of a record are of."""
    return str(record.get("split", "test" if record.get("kind") == "end" else "val"))


def scores_to_compare(histories: Sequence[History]) -> list[Scores]:
    """The final scores; or, if only these are of the same split, those of the best evaluations."""
    evaluated = [history for history in histories if final_scores(history)[1]]
    for scores_of in (final_scores, best_scores):
        records = [scores_of(history)[1] for history in evaluated]
        if all(records) and len({_split(record) for record in records}) == 1:
            return [scores_of(history) for history in histories]
    return [final_scores(history) for history in histories]


def summary(histories: Sequence[History]) -> str:
    scores_of_runs = scores_to_compare(histories)
    records = [record for _, record in scores_of_runs]
    first, several = records[0], len(records) > 1
    names = dict.fromkeys(
        name for record in records for name in record if f"{name}/chance" in record
    )
    note = "; ".join(
        f"{h.name}: {title}" for h, (title, _) in zip(histories, scores_of_runs, strict=True)
    )
    # Of each run, whether its scores can be compared with those of the first.
    comparable = [
        _split(record) == _split(first) and _same_data(histories[0], history)
        for history, record in zip(histories, records, strict=True)
    ]
    if several and any(comparable[1:]):
        note += (
            ". In parentheses: the difference from the first run. An asterisk: the 95% intervals do"
            " not overlap."
        )
    if not all(comparable):
        note += (
            ". Runs with other data or another split than the first run are not compared with it."
        )
    rows = []
    for name in names:
        chance = next(record for record in records if name in record)[f"{name}/chance"]
        cells = [
            _difference(name, first, record) if is_comparable else percent(record.get(name))
            for record, is_comparable in zip(records, comparable, strict=True)
        ]
        if not several:
            low, high = (percent(first[f"{name}/{end}"]) for end in ("low", "high"))
            cells += [f"{low} to {high}", f"{first[f'{name}/n']:,}"]
        rows.append([label(name), percent(chance), *cells])
    columns = [history.name for history in histories] if several else ["value", "95% interval", "n"]
    return f"<p class='hint'>{escape(note)}</p>" + (
        html_table(["metric", "chance", *columns], rows) if rows else ""
    )


def _same_data(first: History, other: History) -> bool:
    """Whether two runs have the same images and captions, by the fingerprint in their folders."""
    fingerprint = first.files.environment.get("data")
    is_same = fingerprint is not None and fingerprint == other.files.environment.get("data")
    return first is other or is_same


def _difference(name: str, first: dict[str, Any], record: dict[str, Any]) -> str:
    if name not in record:
        return "-"
    if record is first or not {f"{name}/low", f"{name}/high"} <= record.keys() & first.keys():
        return percent(record[name])  # without an interval: an evaluation of a very long run
    change = record[name] - first[name]
    apart = (
        record[f"{name}/low"] > first[f"{name}/high"]
        or record[f"{name}/high"] < first[f"{name}/low"]
    )
    return f"{percent(record[name])} ({100 * change:+.1f}{' *' if apart else ''})"


def epoch_table(history: History) -> str:
    """Loss, accuracies within a batch, recall and seconds by epoch."""
    tables = history.tables()
    rows = tables.epoch_cells
    if not rows:
        return ""
    note = f"<p class='hint'>{escape(NOT_COMPARABLE)}</p>"
    return f"<h3>By epoch</h3>{note}{html_table(tables.epoch_head, rows)}"


def adaptation_table(history: History) -> str:
    """Scores of the initial and of the best model, on the new data and on --general-data."""
    rows = []
    for record in history.adaptation.values():
        before, after = record["score_before"], record["score_after"]
        evaluated_data = (
            f"{record.get('role')} data: {record.get('data')}, {record.get('split')} split"
        )
        change = f"{100 * (after - before):+.1f}"
        rows.append(
            [
                evaluated_data,
                label(str(record.get("metric"))),
                percent(before),
                percent(after),
                change,
            ]
        )
    return html_table(["", "metric", "before", "after", "change"], rows) if rows else ""


def phase_table(history: History) -> str:
    """The phases of the loss, and how fast it fell in each."""
    tables = history.tables()
    if not tables.phase_cells:
        return ""
    note = f"<p class='hint'>{escape(tables.phase_note)}</p>" if tables.phase_note else ""
    return f"<h3>Phases of the loss</h3>{html_table(PHASE_HEAD, tables.phase_cells)}{note}"


def rate_tables(history: History) -> str:
    """A table for each analysis with rates: the values of the newest evaluation."""
    tables = ""
    for analysis in ANALYSES.values():
        values = history.analysis(analysis) if analysis.has_rates else []
        if not values:
            continue
        step, newest = values[-1]
        rows = []
        for part, rate in newest.items():
            interval = f"{percent(rate['low'])} to {percent(rate['high'])}"
            cells = [percent(rate["value"]), interval, percent(rate["chance"]), f"{rate['n']:,}"]
            rows.append([part, *cells, analysis.parts.get(part, "")])
        title = analysis.title.partition(", %")[0]
        note = f"{analysis.meaning[0].upper()}{analysis.meaning[1:]}."
        tables += f"<h3>{escape(title)}, step {step:,}</h3><p class='hint'>{escape(note)}</p>"
        tables += html_table(["", "value", "95% interval", "chance", "n", ""], rows)
    return tables


def layer_tables(history: History) -> str:
    """A table for each analysis by layer: its first, last, smallest and largest value."""
    tables = ""
    for analysis in ANALYSES.values():
        values = history.analysis(analysis) if analysis.shown_as == "heat map" else []
        if not values:
            continue
        (first_step, first), (last_step, last) = values[0], values[-1]
        rows = []
        extremes = history.layer_extremes
        for layer in dict.fromkeys([*first, *last]):
            rows.append(
                [
                    layer,
                    _figure(first.get(layer)),
                    _figure(last.get(layer)),
                    _figure_at(extremes.lowest(analysis.name, layer)),
                    _figure_at(extremes.highest(analysis.name, layer)),
                ]
            )
        head = [
            "layer",
            f"first (step {first_step:,})",
            f"last (step {last_step:,})",
            "smallest",
            "largest",
        ]
        note = f"{analysis.meaning[0].upper()}{analysis.meaning[1:]}."
        tables += f"<h3>{escape(analysis.title)}</h3><p class='hint'>{escape(note)}</p>"
        tables += html_table(head, rows)
    return tables


def _figure(value: float | str | None) -> str:
    """A number of the log as text; the log writes NaN as text."""
    return value if isinstance(value, str) else number(value)


def _figure_at(point: tuple[int, float] | None) -> str:
    return "-" if point is None else f"{number(point[1])} at step {point[0]:,}"


def costs(histories: Sequence[History]) -> str:
    def median(history: History, name: str, words: Callable[[float], str]) -> str:
        values = numbers(history.steps, name)
        return words(statistics.median(values)) if values else "not measured"

    def phases(history: History) -> str:
        sums = {phase: sum(numbers(history.steps, f"seconds/{phase}")) for phase in PHASES}
        if history.latest.stages:
            sums = stage_seconds(history)
        total = sum(sums.values())
        words = ", ".join(
            f"{name} {percent(value / total, 0)}" for name, value in sums.items() if value > 0
        )
        note = stage_note(history)
        return f"{words} ({note})" if note else words

    rows: dict[str, Callable[[History], str]] = {
        "state": lambda h: status_of(h).message,
        "steps": lambda h: f"{h.step:,} of {h.total:,}",
        "training time": lambda h: clock(elapsed(h)),
        "command": lambda h: describe_time(h.end["time_use"]) if "time_use" in h.end else "-",
        "images per second, median": lambda h: median(
            h, "images_per_second", lambda value: f"{value:,.0f}"
        ),
        "step, median": lambda h: median(h, "step_seconds", duration),
        "step time by stage": phases,
        "peak memory": lambda h: size(h.end.get("peak_bytes") or h.memory.get("peak")),
    }
    table = [[name, *(words(history) for history in histories)] for name, words in rows.items()]
    return html_table(["", *(history.name for history in histories)], table, css="values costs")


MACHINE_TABLES: dict[str, Callable[[History], Rows]] = {
    "Memory by component": memory_table,
    "Use of each core, mean": core_table,
    "Energy": energy_rows,
    "Temperature, throttling, fan": heat_rows,
}


def machine_tables(histories: Sequence[History]) -> str:
    """What the runs used of their machines, one column per run."""
    tables = ""
    for title, rows_of in MACHINE_TABLES.items():
        columns = [dict(rows_of(history)) for history in histories]
        names = dict.fromkeys(name for column in columns for name in column)
        rows = [[name, *(column.get(name, "-") for column in columns)] for name in names]
        if rows:
            head = ["", *(history.name for history in histories)]
            tables += f"<h3>{escape(title)}</h3>{html_table(head, rows)}"
    return tables


def write_report(runs: Sequence[Path], out: Path) -> Path:
    if out.is_symlink():  # replacing /dev/stdout would break other programs
        raise UserError(
            f"{out}: is a symbolic link, and m1clip does not write through links; choose another"
            " file"
        )
    histories = [History(run).poll() for run in runs]
    for history in histories:
        if not history.start:
            raise UserError(f"{history.run}: has not started yet: its log is empty")
    write_bytes(out, _page(histories))
    return out


def _page(histories: Sequence[History]) -> bytes:
    """The page of the report."""
    names = ", ".join(history.name for history in histories)
    version = escape(str(histories[0].start.get("version", "")))
    several = len(histories) > 1
    items = "".join(
        f"<li class='{diagnosis.level}'>{escape(f'{h.name}: ' if several else '')}{escape(diagnosis.message)}</li>"
        for h in histories
        for diagnosis in diagnose(h, 0.0, "finished")
    )
    body = (
        f"<h1>{escape(names)}</h1><p class='hint'>m1clip {version},"
        f" {time.strftime('%d %B %Y, %H:%M')}</p>"
    )
    diagnostics = f"<ul class='diagnostics'>{items}</ul>" if items else ""
    body += _section(
        "Summary", diagnostics + summary(histories) + "<h3>Cost</h3>" + costs(histories)
    )
    plots = (
        f"<div class='grid'>{curve_plots(histories)}</div>"
        if has_matplotlib()
        else escape(NO_PLOTS)
    )
    body += _section("Curves", plots)
    body += _section("Machine", machine_tables(histories))
    for history in histories:
        run = f": {history.name}" if several else ""
        body += _section(f"Training{run}", epoch_table(history) + phase_table(history))
        body += _section(f"Gained and forgotten{run}", adaptation_table(history))
        body += _section(f"Analysis{run}", rate_tables(history) + layer_tables(history))
        body += _section(f"Examples{run}", _retrieval_grid(history))
        body += _section(f"Settings{run}", _settings(history))
    return html_page(names, body)


def html_page(title: str, body: str) -> bytes:
    """A page with the stylesheet inside it, without scripts or external requests."""
    style = (resources.files("m1clip.web") / "page" / "style.css").read_text(encoding="utf-8")
    page = (
        "<!doctype html>\n<html lang='en' class='report'><head><meta charset='utf-8'><meta name='viewport' "
        "content='width=device-width, initial-scale=1'><meta http-equiv='Content-Security-Policy' "
        "content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">"
        f"<title>m1clip: {escape(title)}</title><style>{style}</style></head><body>{body}</body></html>\n"
    )
    return page.encode("utf-8", "replace")  # a folder name may be invalid UTF-8


def _retrieval_grid(history: History) -> str:
    try:
        data = io.BytesIO(read_small(history.run / "retrieval.png", inside=history.run))
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(data, formats=("PNG", "JPEG")) as opened:
                image = opened.convert("RGB")
    except FileNotFoundError:
        return ""
    except Exception as error:  # noqa: BLE001 (the decoders raise many kinds)
        return (
            "<p class='hint'>retrieval.png skipped:"
            f" {escape(getattr(error, 'strerror', None) or str(error))}</p>"
        )
    image.thumbnail((GRID_WIDTH, 4 * GRID_WIDTH))
    buffer = io.BytesIO()
    image.save(buffer, format="JPEG", quality=85)
    return html_image(
        buffer.getvalue(),
        "jpeg",
        "Captions and the images they retrieve, correct ones marked",
        "wide",
    )


def _settings(history: History) -> str:
    try:
        config = read_small(history.run / "config.toml", inside=history.run).decode(
            "utf-8", "replace"
        )
    except OSError as error:
        config = f"no config.toml: {error.strerror}"
    environment = json.dumps(history.files.environment, indent=2, ensure_ascii=False)
    again = (
        f"m1clip train --config {shlex.quote(str(history.run / 'config.toml'))} --out runs/again"
    )
    words = history.files.environment.get("command")
    command = (
        shlex.join(["m1clip", *map(str, words[1:])])
        if isinstance(words, list) and words
        else "unknown"
    )
    return (
        f"<p>Reproduce: <code>{escape(again)}</code><br>Command: <code>{escape(command)}</code></p>"
        f"<div class='grid'><div><h3>config.toml</h3><pre>{escape(config)}</pre></div>"
        f"<div><h3>environment.json</h3><pre>{escape(environment)}</pre></div></div>"
    )
