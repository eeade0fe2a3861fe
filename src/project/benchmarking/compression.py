"""Pruned and quantized models against the model as it was trained: how good, how fast and how large they are.

On two busy cores the digits' MLP came to 0.985 as trained, 0.989 and 0.981 with 50 % and 90 % of its weights pruned
(0.61 and 0.21 of the compressed file, the same latency), and 0.985 in eight bits (0.28 of the file), where
``int8_dynamic`` was 6 to 17 times as slow: so small a net is all overhead. With ``model.net.width=1024
model.compile=true`` batches of 256 were 2.3 times as fast.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from project.benchmarking import compressed
from project.benchmarking.compare import Spread
from project.benchmarking.measure import Contender, MeasurementError, measure
from project.benchmarking.report import Results
from project.benchmarking.setup import typed_for_training
from project.compression import KINDS
from project.errors import UserError
from project.launch.run import Run

AS_TRAINED = "as trained"


@dataclass
class Variant:
    """A model and what was measured of it.

    Attributes:
        training: Whose checkpoint it is.
        kind: How it is quantized.
        reports: Of the repeats.
    """

    name: str
    training: str
    kind: str | None = None
    reports: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None


def compare_compression(
    config: dict[str, Any],
    run: Run,
    tell: Callable[[str], None],
    amounts: list[float],
    quantize: list[str],
    batch_sizes: list[int],
    calls: int,
    repeats: int,
    timeout_s: float,
) -> Results:
    """Test metrics, latency and size.

    Each pruned model is a training of its own, which is pruned on the way; quantized is the model as it was trained.

    Args:
        config: The experiment.
        run: Its folder, and what was typed.
        tell: Shows a line of progress.
        amounts: Shares of weights that are pruned.
        quantize: How the trained model is quantized.
        batch_sizes: For the latency, on one device.
        calls: Measured forward passes of each size.
        repeats: Fresh processes for each model, in turns; ratios are of measurements of the same turn.
        timeout_s: Of one process.

    Raises:
        UserError: an argument can't be, or the training failed.
    """
    _check(amounts, quantize, run.overrides)
    typed = typed_for_training(run.overrides)
    trainings = {AS_TRAINED: typed} | {
        f"{amount:.0%} pruned": [*typed, "callbacks=pruning", f"callbacks.pruning.amount={amount}"]
        for amount in amounts
    }
    variants = [Variant(name, name) for name in trainings] + [Variant(kind, AS_TRAINED, kind) for kind in quantize]
    checkpoints: dict[str, Path] = {}
    for name, overrides in trainings.items():
        tell(f"training, {name}")
        try:
            checkpoints[name] = _train(name, overrides, run.folder / "runs", timeout_s)
        except MeasurementError as error:
            if name == AS_TRAINED:
                raise UserError(f"the training that is compared with failed: {error}") from error
            next(variant for variant in variants if variant.name == name).error = str(error)
    _measure_in_turns(variants, checkpoints, batch_sizes, calls, repeats, run, timeout_s, tell)
    records = [record(variant, variants[0], batch_sizes) for variant in variants]
    errors = [f"{variant.name}: {variant.error}" for variant in variants if variant.error]
    return Results(records, tables(records, shown_metric(config["monitor"], records[0]), batch_sizes), errors)


def _check(amounts: Any, quantize: Any, overrides: list[str]) -> None:
    if not isinstance(amounts, list) or not all(isinstance(amount, float) and 0 < amount < 1 for amount in amounts):
        raise UserError(f"benchmark.amounts={amounts}: type a list of shares between 0 and 1, as [0.5,0.9], or []")
    if not isinstance(quantize, list) or not set(quantize) <= set(KINDS):
        raise UserError(f"benchmark.quantize={quantize}: type a list of {', '.join(KINDS)}, or []")
    for text in overrides:
        if re.split(r"[.=]", text.lstrip("+~"))[0] == "callbacks":
            raise UserError(f"{text}: this benchmark chooses the callbacks: leave it out")


def _train(name: str, overrides: list[str], folder: Path, timeout_s: float) -> Path:
    """The best checkpoint of a training."""
    typed = [text.replace("{", "{{").replace("}", "}}") for text in overrides]
    arguments = ["-m", "project.train", *typed, "paths.run_dir={folder}", "test=false", "progress=none"]
    contender = Contender(f"training, {name}", arguments, lambda measured: measured.wall_s, threads=None)
    own = folder / _folder_name(contender.name)
    measure(contender, own, timeout_s)
    return own / "run" / "checkpoints" / "best.ckpt"


def _measure_in_turns(
    variants: list[Variant],
    checkpoints: dict[str, Path],
    batch_sizes: list[int],
    calls: int,
    repeats: int,
    run: Run,
    timeout_s: float,
    tell: Callable[[str], None],
) -> None:
    for repeat in range(repeats):
        start = repeat % len(variants)
        for variant in variants[start:] + variants[:start]:
            if variant.error is None:
                tell(f"{repeat + 1}/{repeats} {variant.name}")
                settings = compressed.Settings(variant.kind, batch_sizes, calls)
                contender = compressed.contender(variant.name, checkpoints[variant.training], settings)
                folder = run.folder / "runs" / str(repeat) / _folder_name(variant.name)
                try:
                    variant.reports.append(measure(contender, folder, timeout_s).report)
                except MeasurementError as error:
                    variant.error = str(error)


def _folder_name(name: str) -> str:
    return re.sub(r"[^\w.-]+", "_", name)


def record(variant: Variant, reference: Variant, batch_sizes: list[int]) -> dict[str, Any]:
    """One row of the results; ``..._ratio`` are against the model as it was trained."""
    row: dict[str, Any] = {"what": variant.name, "error": variant.error}
    if variant.error or reference.error:
        return row
    own, others = variant.reports, reference.reports
    first, of_reference = own[0], others[0]
    row |= {"metrics": first["metrics"], "bytes": first["bytes"], "compressed_bytes": first["compressed_bytes"]}
    row["metrics_ratio"] = {
        name: value / of_reference["metrics"][name]
        for name, value in first["metrics"].items()
        if of_reference["metrics"].get(name)
    }
    row["bytes_ratio"] = first["bytes"] / of_reference["bytes"]
    row["compressed_bytes_ratio"] = first["compressed_bytes"] / of_reference["compressed_bytes"]
    p50s = {size: [report["latency_ms"][str(size)] for report in own] for size in batch_sizes}
    before = {size: [report["latency_ms"][str(size)] for report in others] for size in batch_sizes}
    for size in batch_sizes:
        row[f"latency_ms_{size}"] = Spread.of(p50s[size])
        ratios = [slow / fast for fast, slow in zip(p50s[size], before[size], strict=True)]
        row[f"times_as_fast_{size}"] = Spread.of(ratios)
    return row


def shown_metric(monitor: str | None, row: dict[str, Any]) -> str | None:
    """The test's counterpart of the monitored metric, else the first."""
    names = list(row.get("metrics", {}))
    counterpart = f"test/{str(monitor).removeprefix('val/')}"
    return counterpart if counterpart in names else next(iter(names), None)


def tables(rows: list[dict[str, Any]], metric: str | None, batch_sizes: list[int]) -> list[Table]:
    """The rows for people: quality and size, and latency."""
    quality = Table(title="quality, and size of the weights as a file", title_justify="left")
    for name in ("", metric or "", "ratio", "kB", "ratio", "kB zipped", "ratio"):
        quality.add_column(name, justify="left" if name == "" else "right")
    latency = Table(title="latency of a forward pass on one device, and how many times as fast", title_justify="left")
    for name in ("", *(f"{size} samples" if size > 1 else "1 sample" for size in batch_sizes)):
        latency.add_column(name, justify="left" if name == "" else "right")
    for row in rows:
        if "bytes" not in row:
            for one in (quality, latency):
                one.add_row(row["what"], "[red]failed")
            continue
        value, ratio = row["metrics"].get(metric), row["metrics_ratio"].get(metric)
        kilobytes = [
            text
            for name in ("bytes", "compressed_bytes")
            for text in (f"{row[name] / 1000:,.1f}", f"{row[f'{name}_ratio']:.2f}")
        ]
        told = ["" if number is None else f"{number:.4f}" for number in (value, ratio)]
        quality.add_row(row["what"], *told, *kilobytes)
        latency.add_row(row["what"], *(_latency(row, size) for size in batch_sizes))
    return [quality, *([latency] if batch_sizes else [])]


def _latency(row: dict[str, Any], size: int) -> str:
    times_ms, ratio = row[f"latency_ms_{size}"], row[f"times_as_fast_{size}"]
    return f"{times_ms.median:.3f} ms, {ratio.readable('.2f')}"
