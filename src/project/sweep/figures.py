"""Figures of a sweep: each parameter against the metric, all of them at once, and which of them matter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from project.config.composition import slug
from project.files import beside
from project.sweep.record import Sweep
from project.sweep.results import Row, short_header

ENOUGH = 4  # runs, for the importance of parameters to mean anything
FEW = 8  # values that can all stand at an axis


def draw_all(sweep: Sweep, rows: Sequence[Row]) -> None:
    """Write the figures into the sweep's folder ``figures``; for each objective, of the runs that have a value."""
    done = [row for row in rows if row.counts]
    names = {
        key: short for key, short in short_header(done).items() if len({row.parameters.get(key) for row in done}) > 1
    }
    if len(done) < 2 or not names:
        return
    folder = sweep.folder / "figures"
    folder.mkdir(exist_ok=True)
    columns = {key: Column([row.parameters.get(key, "") for row in done]) for key in names}
    for place, (objective, direction) in enumerate(sweep.objectives.items()):
        values = np.array([row.objectives[place] for row in done], dtype=float)
        suffix = f"_{slug(objective.replace('/', '_'))}" if len(sweep.objectives) > 1 else ""
        for key, column in columns.items():
            draw_parameter(folder / f"{slug(names[key])}{suffix}.png", names[key], column, objective, values)
        draw_parallel(folder / f"parallel_coordinates{suffix}.png", names, columns, objective, values, direction)
        if len(done) >= ENOUGH and len(names) > 1:  # one alone explains all there is
            shares = importance(columns, values)
            draw_importance(folder / f"importance{suffix}.png", {names[key]: shares[key] for key in names}, objective)


class Column:
    """One parameter's values in all runs, as numbers: its own, or the places of its choices."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.choices: list[str] = []
        try:
            self.numbers: NDArray[np.float64] = np.array([float(text) for text in texts])
        except ValueError:
            self.choices = sorted(set(texts))
            self.numbers = np.array([self.choices.index(text) for text in texts], dtype=float)
        low, high = self.numbers.min(), self.numbers.max()
        self.is_log = not self.choices and bool(low > 0) and bool(high / low >= 10)

    @property
    def places(self) -> NDArray[np.float64]:
        """From 0 to 1, on a logarithmic scale where values span one."""
        numbers = np.log(self.numbers) if self.is_log else self.numbers
        span = float(np.ptp(numbers))
        return (numbers - numbers.min()) / span if span else np.full(len(numbers), 0.5)


def importance(columns: dict[str, Column], values: NDArray[np.float64]) -> dict[str, float]:
    """Each parameter's share of what a random forest explains of the metric.

    Measured by shuffling it (permutation importance, Breiman 2001, "Random Forests"); shares sum to 1, or are 0 where
    nothing is explained.
    """
    from sklearn.ensemble import RandomForestRegressor  # here, because that takes a second
    from sklearn.inspection import permutation_importance

    features = np.stack([column.places for column in columns.values()], axis=1)
    forest = RandomForestRegressor(n_estimators=64, random_state=0).fit(features, values)
    drops = permutation_importance(forest, features, values, n_repeats=10, random_state=0).importances_mean
    drops = np.maximum(drops, 0)
    total = float(drops.sum())
    return {key: float(drop) / total if total else 0.0 for key, drop in zip(columns, drops, strict=True)}


def draw_parameter(path: Path, name: str, column: Column, objective: str, values: NDArray[np.float64]) -> None:
    """One point a run."""
    figure, axes = _axes(4.5, 3.2)
    axes.scatter(column.numbers, values, s=18, alpha=0.8)
    if column.is_log:
        axes.set_xscale("log")
    tried = np.unique(column.numbers)
    if column.choices:
        axes.set_xticks(range(len(column.choices)), column.choices)
    elif len(tried) <= FEW:
        axes.set_xticks(tried, [f"{number:g}" for number in tried])
        axes.minorticks_off()
    axes.set_xlabel(name)
    axes.set_ylabel(objective)
    _save(figure, path)


def draw_parallel(
    path: Path,
    names: dict[str, str],
    columns: dict[str, Column],
    objective: str,
    values: NDArray[np.float64],
    direction: str,
) -> None:
    """One line a run over all parameters to the metric; the best are drawn last, and darkest."""
    figure, axes = _axes(1.6 * (len(columns) + 1) + 1.5, 3.6)
    metric = Column([str(value) for value in values])
    lines = np.stack([*(column.places for column in columns.values()), metric.places], axis=1)
    goodness = metric.places if direction == "max" else 1 - metric.places
    for place in np.argsort(goodness, kind="stable"):
        axes.plot(lines[place], color=colormaps["viridis_r"](goodness[place]), alpha=0.8, linewidth=1.2)
    titles = [*names.values(), objective]
    for place, column in enumerate([*columns.values(), metric]):
        axes.axvline(place, color="0.5", linewidth=0.6)
        for height, text in _ticks(column):
            axes.text(place + 0.03, height, text, fontsize=7, color="0.3")
    axes.set_xticks(range(len(titles)), titles)
    axes.set_yticks([])
    axes.set_xlim(-0.1, len(titles) - 0.6)
    _save(figure, path)


def draw_importance(path: Path, shares: dict[str, float], objective: str) -> None:
    """The parameters that matter most on top."""
    ordered = sorted(shares.items(), key=lambda item: item[1])
    figure, axes = _axes(4.5, 0.4 * len(shares) + 1.2)
    axes.barh([name for name, _ in ordered], [share for _, share in ordered])
    axes.set_xlabel(f"share of what is explained of {objective}")
    _save(figure, path)


def _ticks(column: Column) -> list[tuple[float, str]]:
    if column.choices:
        return [
            (float(p), column.choices[int(n)]) for p, n in sorted(set(zip(column.places, column.numbers, strict=True)))
        ]
    low, high = int(column.numbers.argmin()), int(column.numbers.argmax())
    return [(float(column.places[place]), f"{column.numbers[place]:.3g}") for place in (low, high)]


def _axes(width: float, height: float) -> tuple[Any, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")  # without pyplot: no window, no global state
    return figure, figure.subplots()


def _save(figure: Any, path: Path) -> None:
    with beside(path) as written:
        figure.savefig(written, dpi=120, format="png")
