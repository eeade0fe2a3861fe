"""How an experiment scales: each strategy on each number of devices, and the latency of its forward pass."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from project.benchmarking import scaling_figure
from project.benchmarking.compare import Spread
from project.benchmarking.measure import Contender, Measured, MeasurementError, measure, step_times_s
from project.benchmarking.report import Results
from project.benchmarking.setup import typed_for_training
from project.benchmarking.trial import Settings, contender, samples_per_s
from project.errors import UserError
from project.launch.run import Run
from project.tracking.windows import percentile

CHOSEN_HERE = {
    "trainer.devices": "benchmark.devices",
    "trainer.strategy": "benchmark.strategies",
    "trainer/strategy": "benchmark.strategies",
}
PERCENTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


@dataclass
class Combination:
    """A strategy on a number of devices, and what was measured of it.

    Attributes:
        kind: ``strong`` scaling keeps the global batch size, ``weak`` the batch size of a device.
        reports: Of the repeats.
        rates: Their samples a second.
    """

    kind: str
    strategy: str
    devices: int
    contender: Contender
    reports: list[dict[str, Any]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    error: str | None = None


def measure_scaling(
    config: dict[str, Any],
    run: Run,
    tell: Callable[[str], None],
    strategies: list[str],
    devices: int | list[int],
    kinds: list[str],
    batch_sizes: list[int],
    calls: int,
    repeats: int,
    warmup_steps: int,
    steps: int,
    timeout_s: float,
) -> Results:
    """Samples a second, step times and their parts, memory, diagnosis, and latency.

    Args:
        config: The experiment.
        run: Its folder, and what was typed.
        tell: Shows a line of progress.
        strategies: Names of ``conf/trainer/strategy``.
        devices: A number of them, or several; efficiency is against the smallest.
        kinds: ``strong``, ``weak`` or both.
        batch_sizes: For the latency, on one device; ``[]`` leaves it out.
        calls: Measured forward passes of each size.
        repeats: Fresh processes for each combination, in turns.
        warmup_steps: Batches that are not measured.
        steps: Batches that are.
        timeout_s: Of one process.
    """
    if unknown := set(kinds) - {"strong", "weak"}:
        raise UserError(f"benchmark.kinds={sorted(unknown)}: type benchmark.kinds=[strong], [weak] or [strong,weak]")
    typed = typed_for_training(run.overrides)
    for text in typed:
        key, _, value = text.partition("=")
        if key in CHOSEN_HERE:
            raise UserError(f"{text}: this benchmark tries several: type {CHOSEN_HERE[key]}=[{value}]")
    settings = Settings(warmup_steps, steps)
    numbers = [devices] if isinstance(devices, int) else sorted(set(devices))
    combinations = [
        _combination(config, typed, settings, kind, strategy, number)
        for strategy in strategies
        for number in numbers
        for kind in kinds
        if kind == "strong" or number > numbers[0] or "strong" not in kinds  # on the fewest both are the same
    ]
    forward = _Forward(typed, Settings(1, 1, batch_sizes, calls))
    for repeat in range(repeats):
        start = repeat % len(combinations)
        for combination in combinations[start:] + combinations[:start]:
            _measure(combination, settings, run, repeat, timeout_s, tell)
        forward.measure(run, repeat, timeout_s, tell)
    records = [_record(combination, combinations, settings) for combination in combinations]
    latency = forward.rows()
    scaling_figure.write(run.folder, records, latency)
    errors = [f"{_name(c)}: {c.error}" for c in combinations if c.error]
    errors += [f"latency: {forward.error}"] if forward.error else []
    return Results(
        [{"what": "training"} | record for record in records] + [{"what": "latency"} | row for row in latency],
        [_table(records), *([_latency_table(latency)] if latency else [])],
        errors,
        [f"figure: {run.folder / scaling_figure.FILE}"],
    )


def _combination(
    config: dict[str, Any], typed: list[str], settings: Settings, kind: str, strategy: str, devices: int
) -> Combination:
    overrides = [*typed, f"trainer/strategy={strategy}", f"trainer.devices={devices}"]
    if kind == "weak":
        overrides.append(f"data.batch_size={config['data']['batch_size'] * devices}")
    name = f"{strategy} on {devices}, {kind}"
    return Combination(kind, strategy, devices, contender(name, overrides, settings))


def _name(combination: Combination) -> str:
    return combination.contender.name


def _measure(
    combination: Combination,
    settings: Settings,
    run: Run,
    repeat: int,
    timeout_s: float,
    tell: Callable[[str], None],
) -> None:
    if combination.error:
        return
    tell(f"{repeat + 1} {_name(combination)}")
    folder = run.folder / "runs" / str(repeat) / re.sub(r"[^\w.-]+", "_", _name(combination))
    try:
        measured = measure(combination.contender, folder, timeout_s)
    except MeasurementError as error:
        combination.error = str(error)
        return
    combination.reports.append(measured.report)
    combination.rates.append(samples_per_s(measured, settings))


@dataclass
class _Forward:
    """Forward passes on one device, of several batch sizes: their times in milliseconds, by repeat."""

    typed: list[str]
    settings: Settings
    times_ms: list[dict[int, list[float]]] = field(default_factory=list)
    error: str | None = None

    def measure(self, run: Run, repeat: int, timeout_s: float, tell: Callable[[str], None]) -> None:
        if self.error or not self.settings.batch_sizes:
            return
        tell(f"{repeat + 1} latency")
        overrides = [*self.typed, "trainer/strategy=auto", "trainer.devices=1"]
        try:
            measured: Measured = measure(
                contender("latency", overrides, self.settings), run.folder / "runs" / str(repeat) / "latency", timeout_s
            )
        except MeasurementError as error:
            self.error = str(error)
            return
        self.times_ms.append({int(size): times for size, times in measured.report["latency_ms"].items()})

    def rows(self) -> list[dict[str, Any]]:
        """One for each batch size: percentiles of all times, and samples a second by the repeats' medians."""
        return [
            {"batch_size": size, "samples_per_s": Spread.expected([1e3 * size / statistics.median(t) for t in repeats])}
            | _percentiles([time_ms for times in repeats for time_ms in times])
            for size in (self.settings.batch_sizes if self.times_ms else [])
            for repeats in [[times[size] for times in self.times_ms]]
        ]


def _record(combination: Combination, all_of_them: list[Combination], settings: Settings) -> dict[str, Any]:
    """One row of the results; times are of all repeats together."""
    record: dict[str, Any] = {
        "kind": combination.kind,
        "strategy": combination.strategy,
        "devices": combination.devices,
        "error": combination.error,
    }
    if combination.error or not combination.reports:
        return record
    rate = Spread.expected(combination.rates)
    steps_ms = [1e3 * s for report in combination.reports for s in step_times_s(report, settings.warmup_batches)]
    last = combination.reports[-1]
    verdicts = [report["diagnosis"] for report in combination.reports if report.get("diagnosis")]
    bounds = [verdict["bound"] for verdict in verdicts]
    record |= {
        "samples_per_s": rate,
        "samples_per_s_per_device": rate.median / combination.devices,
        "efficiency": _efficiency(combination, all_of_them),
        "step_ms": _percentiles(steps_ms),
        "parts_ms": last.get("parts_ms"),
        "memory_bytes": max((report.get("memory_bytes") or 0 for report in combination.reports), default=0) or None,
        "device_bytes": last.get("device_bytes"),
        "bound": statistics.mode(bounds) if bounds else None,
    }
    return record


def _efficiency(combination: Combination, all_of_them: list[Combination]) -> float | None:
    """Samples a second of a device, against the same strategy on the fewest devices; None where that failed."""
    same = [c for c in all_of_them if c.strategy == combination.strategy]
    fewest = min(same, key=lambda c: (c.devices, c.kind != combination.kind))
    if not fewest.rates:
        return None
    per_device = statistics.median(combination.rates) / combination.devices
    return per_device / (statistics.median(fewest.rates) / fewest.devices)


def _percentiles(times_ms: list[float]) -> dict[str, float]:
    ordered = sorted(times_ms)
    return {name: percentile(ordered, share) for name, share in PERCENTILES.items()}


def _table(records: list[dict[str, Any]]) -> Table:
    has_range = any(record["samples_per_s"].is_known for record in records if "samples_per_s" in record)
    told = ": medians, and where the mean lies with 95 % confidence" if has_range else ""
    table = Table(title=f"training{told}", title_justify="left")
    for name in ("strategy", "scaling", "bound by", "devices", "samples/s", "a device", "efficiency", "p50, p95, p99"):
        table.add_column(name, justify="left" if name in ("strategy", "scaling", "bound by") else "right")
    for record in records:
        first = (record["strategy"], record["kind"], record.get("bound") or "", str(record["devices"]))
        if record["error"] or "samples_per_s" not in record:
            table.add_row(*first, "[red]failed")
            continue
        rate, step = record["samples_per_s"], record["step_ms"]
        efficiency = record["efficiency"]
        table.add_row(
            *first,
            rate.readable(",.0f"),
            f"{record['samples_per_s_per_device']:,.0f}",
            "" if efficiency is None else f"{efficiency:.0%}",
            ", ".join(f"{step[name]:.2f}" for name in PERCENTILES) + " ms",
        )
    return table


def _latency_table(latency: list[dict[str, Any]]) -> Table:
    table = Table(title="latency of a forward pass on one device", title_justify="left")
    for name in ("batch size", *PERCENTILES, "samples/s"):
        table.add_column(name, justify="right")
    for row in latency:
        times = [f"{row[name]:.3f} ms" for name in PERCENTILES]
        table.add_row(str(row["batch_size"]), *times, row["samples_per_s"].readable(",.0f"))
    return table
