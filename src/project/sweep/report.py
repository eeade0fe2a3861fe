"""What a sweep leaves in its folder and on the console: results, the best as an experiment, figures, tables."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from project.files import write_whole
from project.launch.summary import readable, shorten
from project.sweep.experiment_file import write_experiment
from project.sweep.record import Sweep
from project.sweep.results import (
    OverSeeds,
    Row,
    as_csv,
    best_row,
    over_seeds,
    ranked,
    rows_of,
    short_header,
    table_of,
)

TOP = 10


def write_report(sweep: Sweep) -> None:
    """Write ``results.csv``, ``best.yaml`` and the figures of a sweep, finished or not, and show its best runs."""
    rows = rows_of(sweep)
    write_whole(sweep.folder / "results.csv", as_csv(*table_of(rows, sweep.objectives, sweep.by_monitor)))
    console = Console()
    best = best_row(rows, sweep.objectives)
    if best is not None:
        from project.sweep.figures import draw_all

        experiment = write_experiment(sweep, best)
        draw_all(sweep, rows)
        console.print(best_table(sweep, rows))
        if groups := over_seeds(rows, sweep.objectives):
            console.print(seeds_table(sweep, groups))
        again = f"python -m project.train experiment={shlex.quote(shorten(experiment))}"
        console.print(f"the best again: {again}", highlight=False, markup=False, soft_wrap=True)
    results = shorten(sweep.folder / "results.csv")
    console.print(f"results: {results}", highlight=False, markup=False, soft_wrap=True)


def best_table(sweep: Sweep, rows: Sequence[Row]) -> Table:
    """The ten best runs."""
    short = short_header(rows)
    best = ranked(rows, sweep.objectives)
    which = "The one finished run" if len(best) == 1 else f"The best of {len(best)} finished runs"
    others = f", of {len(rows)} in all" if len(best) < len(rows) else ""
    # A title is cut into lines as short as the table, which may be narrow.
    title = Text(which + others + _ties(best), no_wrap=True, overflow="ignore")
    table = Table(title=title, title_justify="left")
    for column in ("run", *short.values(), *sweep.objectives, "seconds"):
        table.add_column(column)
    for row in best[:TOP]:
        values = [readable(value) for value in row.objectives if value is not None]
        seconds = "" if row.duration_s is None else f"{row.duration_s:.1f}"
        table.add_row(str(row.number), *(_value(row.parameters.get(key)) for key in short), *values, seconds)
    return table


def _ties(best: Sequence[Row]) -> str:
    """How many of the best runs share the best value, where several do."""
    first = sum(row.objectives == best[0].objectives for row in best)
    if first == 1:
        return ""
    return f"; {'all' if first == len(best) else f'the first {first}'} are equally good"


def seeds_table(sweep: Sweep, groups: Sequence[OverSeeds]) -> Table:
    """Mean and spread over seeds of the ten best sets of parameters."""
    name = next(iter(sweep.objectives))
    table = Table(title=f"{name} over seeds", title_justify="left")
    for title in ("parameters", "mean", "standard deviation", "seeds"):
        table.add_column(title)
    for group in groups[:TOP]:
        spread = "" if group.spread is None else readable(group.spread)
        table.add_row(group.name, readable(group.mean), spread, str(len(group.rows)))
    return table


def _value(text: str | None) -> str:
    """A parameter's value, a long number to four digits."""
    if text is None:
        return ""
    try:
        return text if len(text) <= 8 else f"{float(text):.4g}"
    except ValueError:
        return text
