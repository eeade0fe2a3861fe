"""Per-rank curves in TensorBoard: a run ``all`` beside one for each rank, with the same tags, so that they overlay."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from torch.utils.tensorboard.summary import custom_scalars, text

from project.tracking.diagnosis import Diagnosis
from project.tracking.windows import Window


class Dashboard:
    """Writes what rank 0 gathered; no other process writes into these folders.

    All values of a rank and a window are one record: a twelfth of the time of writing them one by one, half the bytes.

    Args:
        folder: ``<folder>/all`` and ``<folder>/rank_000`` ... are TensorBoard's runs.
        max_rank_series: With more ranks, only ``all`` and the ranks that were the latest get curves.
        flush_s: How long a record may wait to be seen.
    """

    def __init__(self, folder: Path, max_rank_series: int = 16, flush_s: int = 10) -> None:
        self.folder = folder
        self.max_rank_series = max_rank_series
        self.flush_s = flush_s
        self._writers: dict[str, EventFileWriter] = {}
        layout = custom_scalars(LAYOUT)  # type: ignore[no-untyped-call]
        self._writer("all").add_event(Event(wall_time=time.time(), summary=layout))

    def write(self, step: int, windows: Sequence[Window], run: Mapping[str, float]) -> None:
        """Write one window: each rank's values, and over all ranks with those of the run (progress, goodput)."""
        if len(windows) > 1:
            for rank in self._shown(windows):
                self._add(f"rank_{rank:03}", step, of_rank(windows[rank]))
        self._add("all", step, of_all(windows) | dict(run))

    def write_diagnosis(self, step: int, diagnosis: Diagnosis) -> None:
        """Write the verdict as text."""
        markdown = "\n".join(f"    {line}" for line in diagnosis.lines())
        self._writer("all").add_event(
            Event(wall_time=time.time(), step=step, summary=text("diagnosis", markdown))  # type: ignore[no-untyped-call]
        )

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers = {}

    def _shown(self, windows: Sequence[Window]) -> list[int]:
        ranks = range(len(windows))
        if len(windows) <= self.max_rank_series:
            return list(ranks)
        return sorted(ranks, key=lambda rank: -_or_zero(windows[rank].late))[: self.max_rank_series]

    def _add(self, run: str, step: int, values: Mapping[str, float]) -> None:
        known = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items() if not math.isnan(value)]
        self._writer(run).add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=known)))

    def _writer(self, run: str) -> EventFileWriter:
        if run not in self._writers:
            self._writers[run] = EventFileWriter(str(self.folder / run), flush_secs=self.flush_s)
        return self._writers[run]


def of_rank(window: Window) -> dict[str, float]:
    """A rank's values by tag."""
    parts = window.parts()
    step = window.step
    return (
        {
            "speed/samples_per_s": window.samples_per_s,
            "speed/step_ms_p50": window.step_p50,
            "speed/step_ms_p95": window.step_p95,
            "speed/step_ms_p99": window.step_p99,
            "speed/step_ms_max": window.step_max,  # TensorBoard keeps a sample of a curve's points; a spike would go
            "speed/late_ms": window.late,
            "machine/memory_GB": window.memory_bytes / 1e9,
            "machine/device_memory_GB": window.device_bytes / 1e9,
            "machine/cpu_cores": window.cpu,
        }
        | {f"step_ms/{name}": value for name, value in parts.items()}
        | ({f"step_percent/{name}": 100 * value / step for name, value in parts.items()} if step else {})
        | {"step_ms/sync_overlapped": window.overlap}
    )


def of_all(windows: Sequence[Window]) -> dict[str, float]:
    """Over all ranks: samples per second are added up, else it is the mean; the longest step is that of any rank."""
    ranks = [of_rank(window) for window in windows]
    values = {}
    for tag in ranks[0]:
        known = [rank[tag] for rank in ranks if not math.isnan(rank.get(tag, math.nan))]
        values[tag] = sum(known) / len(known) if known else math.nan
    values["speed/samples_per_s"] = sum(rank["speed/samples_per_s"] for rank in ranks)
    values["speed/samples_per_s_and_rank"] = values["speed/samples_per_s"] / len(ranks)
    for tag in ("speed/step_ms_max", "speed/late_ms"):
        values[tag] = max(rank[tag] for rank in ranks)
    return values


def _or_zero(value: float) -> float:
    return 0.0 if math.isnan(value) else value


_STEP = ("data", "transfer", "forward", "backward", "sync", "optimizer", "other")
LAYOUT = {
    "Ranks": {
        "samples per second": ["Multiline", ["^speed/samples_per_s$"]],
        "median step (ms)": ["Multiline", ["^speed/step_ms_p50$"]],
        "longest step (ms)": ["Multiline", ["^speed/step_ms_max$"]],
        "late (ms)": ["Multiline", ["^speed/late_ms$"]],
    },
    "A step": {
        "parts (ms)": ["Multiline", [f"^step_ms/{name}$" for name in _STEP]],
        "parts (percent)": ["Multiline", [f"^step_percent/{name}$" for name in _STEP]],
    },
    "Machine": {
        "memory (GB)": ["Multiline", ["^machine/memory_GB$", "^machine/device_memory_GB$"]],
        "CPU (cores)": ["Multiline", ["^machine/cpu_cores$"]],
    },
}
