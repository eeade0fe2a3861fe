"""Measure, diagnose, try what could help, keep what does, and again: the loop that one goes through by hand.

On a loader that waits 5 ms for each sample it found ``data.num_workers=2`` on two busy cores, 2.07 times as fast.
"""

from __future__ import annotations

import os
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from project.benchmarking.candidates import Machine, candidates
from project.benchmarking.compare import Spread
from project.benchmarking.measure import MeasurementError, measure
from project.benchmarking.report import Results
from project.benchmarking.setup import compose_training, typed_experiment, typed_for_training
from project.benchmarking.trial import Settings, contender, samples_per_s
from project.cpu import usable_cores
from project.errors import UserError
from project.launch import devices
from project.launch.run import Run
from project.strategies import is_single_process
from project.sweep.experiment_file import experiment
from project.tracking.remedies import changes_results

FILE = "optimized.yaml"
FIRST = Settings(warmup_batches=3, batches=10)  # to learn how long a batch takes
FEWEST_BATCHES = 20  # what loader workers have fetched ahead is over by then


@dataclass(frozen=True)
class Tried:
    """An override and what came of it.

    Attributes:
        bound: What bounded the run before.
        verdict: ``kept``, ``no gain``, ``failed`` or ``changes results``.
        rates: Samples a second with it.
        gain: Against those without it, measured in turns.
    """

    override: str
    bound: str
    verdict: str
    rates: Spread | None = None
    gain: float | None = None
    error: str | None = None


@dataclass
class Search:
    """The search under way."""

    run: Run
    tell: Callable[[str], None]
    typed: list[str]
    min_gain: float
    repeats: int
    timeout_s: float
    ends_at: float
    settings: Settings = FIRST
    kept: list[str] = field(default_factory=list)
    tried: list[Tried] = field(default_factory=list)
    num_trials: int = 0
    longest_s: float = 0.0

    def out_of_time(self, trials: int = 1) -> bool:
        return time.monotonic() + trials * self.longest_s > self.ends_at

    def measure(self, *more: str) -> tuple[float, dict[str, Any]]:
        """Samples a second of what is kept and ``more``, and the trial's report.

        Raises:
            MeasurementError: it failed; running out of memory is one way to.
        """
        name = " ".join(more) or "as it is"
        self.tell(f"trial {self.num_trials + 1}: {name}")
        as_folder = re.sub(r"[^\w.=-]+", "_", name)[:60]
        folder = self.run.folder / "runs" / f"{self.num_trials}_{as_folder}"
        self.num_trials += 1
        begin = time.monotonic()
        overrides = merged([*self.typed, *self.kept], list(more))
        measured = measure(contender(name, overrides, self.settings), folder, self.timeout_s)
        self.longest_s = max(self.longest_s, time.monotonic() - begin)
        return samples_per_s(measured, self.settings), measured.report


def optimize(
    config: dict[str, Any],
    run: Run,
    tell: Callable[[str], None],
    allow_inexact: bool,
    min_gain: float,
    budget_s: float,
    measured_s: float,
    repeats: int,
    timeout_s: float,
) -> Results:
    """Find overrides that make an experiment faster on this machine, and write them as an experiment file.

    Args:
        config: The experiment.
        run: Its folder, and what was typed.
        tell: Shows a line of progress.
        allow_inexact: Also try what changes the results: batch size, precision, accumulation, compression.
        min_gain: What is kept gains at least this share beyond the noise.
        budget_s: No trial is begun that would not end within this time.
        measured_s: About how long batches are measured in each trial.
        repeats: Trials of each side, in turns, before a remedy is kept.
        timeout_s: Of one trial.
    """
    search = Search(
        run, tell, typed_for_training(run.overrides), min_gain, repeats, timeout_s, time.monotonic() + budget_s
    )
    try:
        rate, _ = search.measure()
        per_batch_s = config["data"].get("batch_size", 1) / rate
        search.settings = Settings(10, max(FEWEST_BATCHES, min(5000, round(measured_s / per_batch_s))))
        base_rates: list[float] = []
        report: dict[str, Any] = {}
        for _ in range(repeats):
            rate, report = search.measure()
            base_rates.append(rate)
    except MeasurementError as error:
        raise UserError(f"the experiment as it is fails: {error}") from error

    rates = base_rates
    while (step := _next(search, report, allow_inexact)) is not None and not search.out_of_time():
        rates, report = _try(search, *step, rates, report)
    return _results(search, base_rates, rates, report, is_cut=step is not None)


def _next(search: Search, report: dict[str, Any], allow_inexact: bool) -> tuple[str, str] | None:
    """What to try next and against what; notes what may not be tried."""
    diagnosis = report.get("diagnosis") or {"bound": "unknown", "remedies": []}
    config = compose_training([*search.typed, *search.kept])
    known = {tried.override for tried in search.tried}
    for override in candidates(diagnosis["bound"], list(diagnosis["remedies"]), config, _machine(config)):
        if override in known:
            continue
        if not changes_results(override) or allow_inexact:
            return override, diagnosis["bound"]
        search.tried.append(Tried(override, diagnosis["bound"], "changes results"))
    return None


def _machine(config: dict[str, Any]) -> Machine:
    trainer = config["trainer"]
    ranks = 1 if is_single_process(trainer["strategy"]) else devices.count(trainer["accelerator"], trainer["devices"])
    on_gpu = devices.count_gpus(trainer["accelerator"], trainer["devices"]) > 0
    return Machine(max(1, usable_cores() // ranks), on_gpu, ranks > 1)


def _try(
    search: Search, override: str, bound: str, rates: list[float], report: dict[str, Any]
) -> tuple[list[float], dict[str, Any]]:
    """Measure an override against what is kept; the rates and the report of what is kept afterwards."""
    theirs: list[float] = []
    ours: list[float] = []
    latest = report
    try:
        while len(theirs) < search.repeats:
            rate, latest = search.measure(override)
            theirs.append(rate)
            if rate < statistics.median(rates) * (1 + search.min_gain) or search.out_of_time(2):
                break  # what doesn't gain at once is not worth more trials
            ours.append(search.measure()[0])
    except MeasurementError as error:
        search.tried.append(Tried(override, bound, "failed", error=str(error)))
        return rates, report
    ours = ours or rates
    gain = statistics.median(theirs) / statistics.median(ours)
    keeps = len(theirs) == search.repeats and gain >= 1 + search.min_gain + noise(ours, theirs)
    search.tried.append(Tried(override, bound, "kept" if keeps else "no gain", Spread.of(theirs), gain))
    if not keeps:
        return rates, report
    search.kept = merged(search.kept, [override])
    return theirs, latest


def noise(*measured: list[float]) -> float:
    """By what share repeated measurements of the same differ from their median: the largest of several."""
    return max((max(rates) - min(rates)) / 2 / statistics.median(rates) for rates in measured)


def merged(overrides: list[str], later: list[str]) -> list[str]:
    """Overrides and later ones, of which each replaces an earlier one of its key."""
    keys = {text.lstrip("+~").partition("=")[0] for text in later}
    return [text for text in overrides if text.lstrip("+~").partition("=")[0] not in keys] + later


def _results(search: Search, before: list[float], after: list[float], report: dict[str, Any], is_cut: bool) -> Results:
    gain = statistics.median(after) / statistics.median(before) if search.kept else 1.0
    comment = f"{gain:.2f} times the samples a second, on {os.cpu_count()} cores"
    path = search.run.folder / FILE
    path.write_text(experiment(merged(search.typed, search.kept), typed_experiment(), comment))
    bound = (report.get("diagnosis") or {"bound": "unknown"})["bound"]
    closing = [
        f"{statistics.median(before):,.0f} samples/s before, {statistics.median(after):,.0f} after: {gain:.2f} times; "
        f"now bound by {bound}",
        f"python -m project.train {' '.join(merged(search.typed, search.kept))}".rstrip(),
        f"python -m project.train experiment={path}",
    ]
    if not search.kept:
        closing.insert(0, "nothing that was tried gains enough: the experiment stays as it is")
    if is_cut:
        closing.append("the time is up: benchmark.budget_s=600 gives it more")
    rows = [{name: getattr(tried, name) for name in Tried.__dataclass_fields__} for tried in search.tried]
    summary = {
        "override": "all that was kept",
        "bound": bound,
        "verdict": "kept",
        "rates": Spread.of(after),
        "gain": gain,
    }
    return Results([*rows, summary], [_table(search.tried)], [], closing)


def _table(tried: list[Tried]) -> Table:
    table = Table(title="tried", title_justify="left")
    for name in ("against", "override", "samples/s", "gain", ""):
        table.add_column(name, justify="right" if name in ("samples/s", "gain") else "left")
    for one in tried:
        table.add_row(
            one.bound,
            one.override,
            f"{one.rates.median:,.0f}" if one.rates else "",
            f"{one.gain:.2f}" if one.gain else "",
            {
                "kept": "[green]kept",
                "changes results": "not tried, it changes results: benchmark.allow_inexact=true",
                "failed": f"[red]failed: {(one.error or '').replace('[', '(')[:80]}",
            }.get(one.verdict, one.verdict),
        )
    return table
