"""The scaling curves and the latency, as a picture and in TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

FILE = "scaling.png"


def write(folder: Path, records: list[dict[str, Any]], latency: list[dict[str, Any]]) -> None:
    """Write ``scaling.png`` and ``tensorboard/``, in whose curves a step is a number of devices or a batch size."""
    from torch.utils.tensorboard import SummaryWriter

    measured = [record for record in records if "samples_per_s" in record]
    figure = draw(measured, latency)
    figure.savefig(folder / FILE, dpi=150)
    with SummaryWriter(str(folder / "tensorboard")) as writer:
        for record in measured:
            name = f"{record['strategy']}_{record['kind']}"
            writer.add_scalar(f"samples_per_s/{name}", record["samples_per_s"].median, record["devices"])
            if record["efficiency"] is not None:
                writer.add_scalar(f"efficiency/{name}", record["efficiency"], record["devices"])
        for row in latency:
            for name in ("p50", "p95", "p99"):
                writer.add_scalar(f"latency_ms/{name}", row[name], row["batch_size"])
        writer.add_figure("scaling", figure)


def draw(records: list[dict[str, Any]], latency: list[dict[str, Any]]) -> Figure:
    """Throughput over devices, with the ideal as a dashed line, beside latency over the batch size."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for number, (strategy, kind) in enumerate(dict.fromkeys((r["strategy"], r["kind"]) for r in records)):
        _draw_curve(left, f"C{number}", _curve(records, strategy, kind), f"{strategy}, {kind}")
    left.set(xlabel="devices", ylabel="samples a second", title="throughput (dashed: ideal)", ylim=(0, None))
    left.set_xticks(sorted({record["devices"] for record in records}))
    if records:
        left.legend()
    if latency:
        sizes = [row["batch_size"] for row in latency]
        right.plot(sizes, [row["p50"] for row in latency], "o-", label="p50")
        bounds = [[row[name] for row in latency] for name in ("p50", "p99")]
        right.fill_between(sizes, *bounds, alpha=0.2, label="to p99")
        right.set_xscale("log", base=2)
        right.legend()
    right.set(xlabel="batch size", ylabel="ms", title="latency of a forward pass", ylim=(0, None))
    return figure


def _curve(records: list[dict[str, Any]], strategy: str, kind: str) -> list[dict[str, Any]]:
    """The points of a curve; weak scaling starts where strong scaling does, at the fewest devices."""
    of_strategy = [record for record in records if record["strategy"] == strategy]
    fewest = min(record["devices"] for record in of_strategy)
    points = [record for record in of_strategy if record["kind"] == kind or record["devices"] == fewest]
    return sorted(points, key=lambda record: int(record["devices"]))


def _draw_curve(axes: Axes, color: str, points: list[dict[str, Any]], label: str) -> None:
    devices = [point["devices"] for point in points]
    rates = [point["samples_per_s"] for point in points]
    errors = [[rate.median - rate.low for rate in rates], [rate.high - rate.median for rate in rates]]
    axes.errorbar(devices, [rate.median for rate in rates], errors, fmt="o-", capsize=3, color=color, label=label)
    ideal = [rates[0].median * number / devices[0] for number in devices]
    axes.plot(devices, ideal, "--", color=color, alpha=0.4)
