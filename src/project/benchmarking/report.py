"""A benchmark's results: the table on the console, ``benchmark.json`` and ``benchmark.csv``."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from project.benchmarking.compare import Row, Spread


def write(folder: Path, rows: list[Row], facts: dict[str, Any]) -> None:
    """Write the rows, with ``facts`` about the machine and the measurement in the JSON file."""
    content = facts | {"rows": [dataclasses.asdict(row) for row in rows]}
    (folder / "benchmark.json").write_text(json.dumps(content, indent=2) + "\n")
    flat = [_flatten(dataclasses.asdict(row)) for row in rows]
    with (folder / "benchmark.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in flat for name in row)))
        writer.writeheader()
        writer.writerows(flat)


def _flatten(row: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in row.items():
        flat |= (
            {f"{name}_{part}": number for part, number in value.items()} if isinstance(value, dict) else {name: value}
        )
    return flat


def show(title: str, rows: list[Row]) -> None:
    """Print the table: medians, and the smallest and largest ratio of a repeat in brackets."""
    table = Table(title=title, title_justify="left")
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
            f"{'[red]' if missed else ''}{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})",
            "" if row.at_least is None else f"{row.at_least:.2f}",
        )
    console = Console()
    console.width = max(console.width, 120)
    console.print(table)


def readable(seconds: Spread, per: str) -> str:
    """A rate for steps and samples, a time for what is longer."""
    if per in ("step", "sample"):
        return f"{1 / seconds.median:,.0f} {per}s/s"
    return f"{seconds.median:.3g} s/{per}"
