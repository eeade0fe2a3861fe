"""What the jobs of a sweep came to: one row each, read from their folders."""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from project.launch import run_state
from project.sweep.jobs import Job, name_of, short_keys
from project.sweep.record import Sweep

SEED = "seed"


@dataclass(frozen=True)
class Row:
    """One run.

    ``parameters`` are by their keys in the config, without the plus that adds one; ``objectives`` are its values of
    what the sweep compares, None where it has none (yet).
    """

    number: int
    name: str
    parameters: dict[str, str]
    folder: Path
    state: str  # waiting, running, finished, pruned, failed, interrupted, killed
    started_at: float | None  # seconds since 1970
    duration_s: float | None
    objectives: tuple[float | None, ...]
    metrics: dict[str, float]
    error: str | None

    @property
    def counts(self) -> bool:
        """Whether it ran to its end and can be the best."""
        return self.state == "finished" and bool(self.objectives) and None not in self.objectives


def rows_of(sweep: Sweep) -> list[Row]:
    """The rows of a sweep's jobs, in their order."""
    return [row_of(job, sweep) for job in sorted(sweep.jobs, key=lambda job: job.number)]


def row_of(job: Job, sweep: Sweep) -> Row:
    """The row of a job. A trial of a search that has no value of what is searched for has failed."""
    found = read_row(job, sweep.objectives, sweep.by_monitor)
    if sweep.kind == "optuna" and found.state == "finished" and None in found.objectives:
        named = zip(sweep.objectives, found.objectives, strict=True)
        missing = ", ".join(name for name, value in named if value is None)
        return replace(found, state="failed", error=f"it has no finite {missing}")
    return found


def read_row(job: Job, objectives: dict[str, str], by_monitor: bool = True) -> Row:
    """What a job's folder says; ``by_monitor`` as in ``Sweep``."""
    folder = job.folder
    outcome = read_outcome(folder)
    known = run_state.read(folder)
    state = known.state if known else "finished" if outcome else "waiting"
    if state == "finished" and outcome.get("pruned"):
        state = "pruned"
    metrics = {key: value for key, value in outcome.get("metrics", {}).items() if value is not None}
    values = tuple(objective(outcome, name, monitored=by_monitor and len(objectives) == 1) for name in objectives)
    return Row(
        number=job.number,
        name=job.name,
        parameters={key.lstrip("+"): value for key, value in job.parameters.items()},
        folder=folder,
        state=state,
        started_at=known.started_at if known else None,
        duration_s=known.duration_s if known else outcome.get("train_s"),
        objectives=values,
        metrics=metrics,
        error=known.error if known else None,
    )


def read_outcome(folder: Path) -> dict[str, Any]:
    """``metrics.json`` of a run folder; empty where there is none."""
    try:
        found: dict[str, Any] = json.loads((folder / "metrics.json").read_text())
    except (OSError, ValueError):
        return {}
    return found


def objective(outcome: dict[str, Any], name: str, monitored: bool) -> float | None:
    """A run's value of an objective: a metric, or a number of the outcome (``train_s``, ``samples_per_s``).

    Of the ``monitored`` metric the best value counts and not the last.
    """
    value = outcome.get("objective") if monitored else None
    if value is None:
        value = outcome.get("metrics", {}).get(name, outcome.get(name))
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def ranked(rows: Sequence[Row], objectives: dict[str, str]) -> list[Row]:
    """The finished rows, the best first; under several objectives those that no other surpasses in all come first."""
    signs = [1 if direction == "min" else -1 for direction in objectives.values()]
    costs = {
        id(row): tuple(sign * float(v or 0) for sign, v in zip(signs, row.objectives, strict=True))
        for row in rows
        if row.counts
    }

    def surpassed(own: tuple[float, ...]) -> bool:
        return any(all(o <= v for o, v in zip(other, own, strict=True)) and other != own for other in costs.values())

    finished = [row for row in rows if row.counts]
    return sorted(finished, key=lambda row: (len(signs) > 1 and surpassed(costs[id(row)]), costs[id(row)]))


@dataclass(frozen=True)
class OverSeeds:
    """Runs that differ in their seed alone: mean and standard deviation (of a sample) of the first objective."""

    name: str
    rows: tuple[Row, ...]
    mean: float
    spread: float | None


def over_seeds(rows: Sequence[Row], objectives: dict[str, str]) -> list[OverSeeds]:
    """Finished runs by all their parameters but the seed, the best mean first; empty where no seed varies.

    Groups that lack seeds which others have come last: chance favours them.
    """
    groups: dict[tuple[tuple[str, str], ...], list[Row]] = {}
    for one in rows:
        if one.counts and SEED in one.parameters:
            key = tuple((name, value) for name, value in one.parameters.items() if name != SEED)
            groups.setdefault(key, []).append(one)
    found = []
    for key, members in groups.items():
        values = [float(member.objectives[0] or 0) for member in members]
        spread = statistics.stdev(values) if len(values) > 1 else None
        found.append(OverSeeds(name_of(dict(key)) or "all", tuple(members), statistics.fmean(values), spread))
    if max((len(group.rows) for group in found), default=0) < 2:
        return []
    sign = 1 if next(iter(objectives.values())) == "min" else -1
    return sorted(found, key=lambda group: (-len(group.rows), sign * group.mean))


def best_row(rows: Sequence[Row], objectives: dict[str, str]) -> Row | None:
    """The best run; where seeds vary, the best run of the parameters with the best mean."""
    groups = over_seeds(rows, objectives)
    candidates = ranked(groups[0].rows if groups else rows, objectives)
    return candidates[0] if candidates else None


def table_of(
    rows: Sequence[Row], objectives: dict[str, str], by_monitor: bool = True
) -> tuple[list[str], list[list[Any]]]:
    """Header and rows of ``results.csv``."""
    parameters = list(dict.fromkeys(key for row in rows for key in row.parameters))
    metrics = sorted({name for row in rows for name in row.metrics})
    is_best = by_monitor and len(objectives) == 1
    compared = [f"best {name}" if is_best else name for name in objectives]
    metrics = [name for name in metrics if name not in compared]
    header = ["run", "state", "duration_s", *parameters, *compared, *metrics, "error", "folder"]
    body: list[list[Any]] = [
        [
            row.number,
            row.state,
            None if row.duration_s is None else round(row.duration_s, 2),
            *(row.parameters.get(key) for key in parameters),
            *row.objectives,
            *(row.metrics.get(name) for name in metrics),
            row.error,
            row.folder.name,
        ]
        for row in rows
    ]
    return header, body


def as_csv(header: Sequence[str], body: Sequence[Sequence[Any]]) -> str:
    """The table as CSV; None is an empty cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(body)
    return text.getvalue()


def short_header(rows: Sequence[Row]) -> dict[str, str]:
    """``{parameter: what to call it in a narrow table}``."""
    return short_keys(dict.fromkeys(key for row in rows for key in row.parameters))
