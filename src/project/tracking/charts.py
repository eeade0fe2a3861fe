"""What TensorBoard shows of a window: curves by tag, and how its pages arrange them."""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Mapping

import torch
from torch import Tensor

from project.tracking.diagnosis import Diagnosis
from project.tracking.phases import PHASES
from project.tracking.windows import Ranks

PARTS = (*PHASES[:-2], "sync", "optimizer", "other")
# Of which the least, the median and the greatest over the ranks are drawn as a band, and the rest as a histogram.
SPREAD = ("speed/busy_ms", "speed/late_ms", "step_ms/data", "step_ms/forward", "machine/memory_GB")
HISTOGRAMS = ("speed/busy_ms", "step_ms/data")


def of_ranks(ranks: Ranks) -> dict[str, Tensor]:
    """Values of all ranks by tag, (R,) each; NaN where not known."""
    step = ranks.step()
    parts = ranks.parts()
    curves = {
        "speed/samples_per_s": ranks["samples"] / ranks["wall_s"],
        "speed/tokens_per_s": ranks["tokens"] / ranks["wall_s"],
        "speed/step_ms_p50": ranks["step_p50"],
        "speed/step_ms_p95": ranks["step_p95"],
        "speed/step_ms_p99": ranks["step_p99"],
        "speed/step_ms_max": ranks["step_max"],  # TensorBoard keeps a sample of a curve's points; a spike would go
        "speed/busy_ms": ranks.busy(),
        "speed/late_ms": ranks["late"],
        "machine/memory_GB": ranks["memory_bytes"] / 1e9,
        "machine/memory_peak_GB": ranks["memory_peak_bytes"] / 1e9,
        "machine/device_memory_GB": ranks["device_bytes"] / 1e9,
        "machine/device_memory_peak_GB": ranks["device_peak_bytes"] / 1e9,
        "machine/cpu_cores": ranks["cpu"],
        "machine/gpu_percent": ranks["gpu_percent"],
        "machine/gpu_celsius": ranks["gpu_celsius"],
        "machine/gpu_watts": ranks["gpu_watts"],
    }
    for name, part in parts.items():
        curves[f"step_ms/{name}"] = part
        curves[f"step_percent/{name}"] = 100 * part / step
    curves["step_ms/sync_overlapped"] = ranks["overlap"]
    return curves


def of_all(curves: Mapping[str, Tensor], num_replicas: int) -> dict[str, float]:
    """Over all ranks: what is done per second is added up, else it is the mean; the worst is that of any rank.

    Args:
        curves: Of the ranks.
        num_replicas: Of the model: ranks that share one compute the same samples, which count once.
    """
    tags = list(curves)
    table = torch.stack([curves[tag] for tag in tags])  # (tags, R)
    values = dict(zip(tags, table.nanmean(dim=1).tolist(), strict=True))
    for name in ("samples", "tokens"):
        values[f"speed/{name}_per_s"] *= num_replicas
    values["speed/samples_per_s_and_device"] = values["speed/samples_per_s"] / table.shape[1]
    for tag in ("speed/step_ms_max", "speed/late_ms"):
        values[tag] = float(curves[tag].max())
    return values


def spread(curves: Mapping[str, Tensor]) -> dict[str, float]:
    """The bands: least, median and greatest over the ranks."""
    table = torch.stack([curves[tag] for tag in SPREAD]).sort(dim=1).values  # NaN comes last
    known = (~table.isnan()).sum(dim=1).clamp(min=1)
    rows = torch.arange(len(SPREAD))
    values: dict[str, float] = {}
    for name, column in (("min", 0 * known), ("median", (known - 1) // 2), ("max", known - 1)):
        picked = table[rows, column].tolist()
        values |= {_band(tag, name): value for tag, value in zip(SPREAD, picked, strict=True)}
    return values


def of_straggler(diagnosis: Diagnosis, windows: int) -> dict[str, float]:
    """Who holds the others up: -1 for nobody, and for a phase that is not known.

    Args:
        diagnosis: Of a window.
        windows: For how many in a row it has been this rank.
    """
    there = diagnosis.bound == "straggler"
    phase = PHASES.index(diagnosis.phase) if there and diagnosis.phase in PHASES else -1
    return {
        "straggler/rank": float(diagnosis.rank) if there and diagnosis.rank is not None else -1.0,
        "straggler/phase": float(phase),
        "straggler/factor": diagnosis.factor if there else 1.0,
        "straggler/windows": float(windows),
    }


def _band(tag: str, end: str) -> str:
    return f"ranks/{tag.partition('/')[2]}_{end}"


def _lines(*tags: str) -> list[object]:
    return ["Multiline", [f"^{tag}$" for tag in tags]]


LAYOUT: dict[str, dict[str, list[object]]] = {
    "Ranks": {
        "samples per second": _lines("speed/samples_per_s"),
        "median step (ms)": _lines("speed/step_ms_p50"),
        "longest step (ms)": _lines("speed/step_ms_max"),
        "busy in a step (ms)": _lines("speed/busy_ms"),
        "late in a step (ms)": _lines("speed/late_ms"),
    },
    "A step": {
        "parts (ms)": _lines(*(f"step_ms/{name}" for name in PARTS)),
        "parts (percent)": _lines(*(f"step_percent/{name}" for name in PARTS)),
    },
    "Least, median and greatest of the ranks": {
        tag.partition("/")[2]: ["Margin", [_band(tag, end) for end in ("median", "min", "max")]] for tag in SPREAD
    },
    "Machine": {
        "memory (GB)": _lines("machine/memory_GB", "machine/device_memory_GB"),
        "CPU (cores)": _lines("machine/cpu_cores"),
        "GPU (percent)": _lines("machine/gpu_percent"),
    },
}

PINNED = (
    "speed/samples_per_s",
    "speed/step_ms_p50",
    "speed/step_ms_max",
    "speed/busy_ms",
    "progress/percent",
    "train/loss",
)


def page_url(port: int = 6006) -> str:
    """TensorBoard's page with the cards that matter pinned, and one colour for each rank."""
    cards = json.dumps([{"plugin": "scalars", "tag": tag} for tag in PINNED], separators=(",", ":"))
    query = urllib.parse.urlencode({"pinnedCards": cards, "runColorGroup": r"regex:(all|rank_\d+)$"})
    return f"http://localhost:{port}/?{query}#timeseries"
