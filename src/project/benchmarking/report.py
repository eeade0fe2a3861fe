"""A benchmark's results: the tables on the console, ``benchmark.json`` and ``benchmark.csv``."""

from __future__ import annotations

import csv
import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from project.benchmarking.compare import Row, Spread

ONCE = "Each was measured once: the range of its values needs benchmark.repeats=2 or more"


@dataclass(frozen=True)
class Results:
    """What a benchmark found.

    Attributes:
        rows: Plain data and ``Spread``s.
        tables: The same for people.
        errors: Of the rows that failed.
        closing: Lines after the tables.
    """

    rows: list[dict[str, Any]]
    tables: list[Table]
    errors: list[str] = field(default_factory=list)
    closing: list[str] = field(default_factory=list)


def of_comparisons(rows: list[Row]) -> Results:
    """The rows as one table: medians, and the smallest and largest ratio of a repeat in brackets."""
    table = Table(title_justify="left")
    for name in ("", "this", "against", "times as fast", "at least"):
        table.add_column(name, justify="left" if name == "" else "right")
    for row in rows:
        if row.candidate_s is None or row.reference_s is None or row.times_as_fast is None:
            table.add_row(row.what, "[red]failed")
            continue
        ratio = row.times_as_fast
        missed = row.at_least is not None and ratio.median < row.at_least
        table.add_row(
            row.what,
            readable(row.candidate_s, row.per),
            readable(row.reference_s, row.per),
            f"{'[red]' if missed else ''}{ratio.readable('.2f')}",
            "" if row.at_least is None else f"{row.at_least:.2f}",
        )
    plain = [{f.name: getattr(row, f.name) for f in dataclasses.fields(row)} for row in rows]
    return Results(plain, [table], [row.error for row in rows if row.error])


def write(folder: Path, results: Results, facts: dict[str, Any]) -> None:
    """Write the rows, with ``facts`` about the machine and the measurement in the JSON file."""
    rows = [_plain(row) for row in results.rows]
    (folder / "benchmark.json").write_text(json.dumps(facts | {"rows": rows}, indent=2) + "\n")
    flat = [_flatten(row) for row in rows]
    with (folder / "benchmark.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in flat for name in row)))
        writer.writeheader()
        writer.writerows(flat)


def _plain(value: Any) -> Any:
    if isinstance(value, Spread):
        return dataclasses.asdict(value)
    return {name: _plain(part) for name, part in value.items()} if isinstance(value, dict) else value


def _flatten(row: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in row.items():
        flat |= (
            {f"{name}_{part}": number for part, number in value.items()} if isinstance(value, dict) else {name: value}
        )
    return flat


def show(title: str, results: Results) -> None:
    """Print the tables and what follows them."""
    console = Console()
    console.width = max(console.width, 120)
    console.print(title, highlight=False)
    for table in results.tables:
        console.print(table)
    spreads = [value for row in results.rows for value in row.values() if isinstance(value, Spread)]
    if spreads and not any(spread.is_known for spread in spreads):
        console.print(ONCE, highlight=False, soft_wrap=True)
    for line in results.closing:
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def readable(seconds: Spread, per: str) -> str:
    """A rate for steps and samples, a time for what is longer."""
    if per in ("step", "sample"):
        return f"{1 / seconds.median:,.0f} {per}s/s"
    return f"{seconds.median:.3g} s/{per}"
