"""Per-rank curves in TensorBoard: a run ``all`` beside one for each rank, with the same tags, so that they overlay.

Other loggers get the same, with the rank before the tag.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from torch import Tensor
from torch.utils.tensorboard.summary import custom_scalars, text

from project.tracking import charts
from project.tracking.diagnosis import Diagnosis
from project.tracking.figures import BusyHistory, as_value, bars, heat_map
from project.tracking.windows import Ranks


class Dashboard:
    """Writes what rank 0 gathered; no other process writes into these folders.

    All values of a rank and a window are one record: a twelfth of the time of writing them one by one, half the bytes.

    Args:
        folder: ``<folder>/all`` and ``<folder>/rank_000`` ... are TensorBoard's runs; None writes no such files.
        max_rank_series: With more ranks, only ``all`` and so many of them get curves: those that are the latest at
            first, and later also those that are named as stragglers.
        num_replicas: Of the model; ranks that share one compute the same samples.
        flush_s: How long a record may wait to be seen.
        loggers: Of Lightning's kind; they get the curves too, and figures and texts if they have ``add_figure`` and
            ``add_text``.
    """

    def __init__(
        self,
        folder: Path | None,
        max_rank_series: int = 16,
        num_replicas: int = 1,
        flush_s: int = 10,
        loggers: Sequence[Any] = (),
    ) -> None:
        self.folder = folder
        self.max_rank_series = max_rank_series
        self.num_replicas = num_replicas
        self.flush_s = flush_s
        self.loggers = loggers
        self._writers: dict[str, EventFileWriter] = {}
        self._history = BusyHistory()
        self._shown: list[int] = []
        self._write("all", 0, custom_scalars(charts.LAYOUT))  # type: ignore[no-untyped-call]

    def write(
        self,
        step: int,
        ranks: Ranks,
        run: Mapping[str, float],
        straggler: int | None = None,
        replicas_ms: Sequence[float] = (),
    ) -> None:
        """Write one window: each rank's values, and over all ranks with those of the run (progress, goodput).

        Args:
            step: Of the optimizer.
            ranks: The window.
            run: More values by tag.
            straggler: A rank whose curves must not be missing.
            replicas_ms: Of ``dp``, each replica's forward.
        """
        curves = charts.of_ranks(ranks)
        values = charts.of_all(curves, self.num_replicas) | dict(run)
        histograms = []
        if len(ranks) > 1:
            self._history.add(step, curves["speed/busy_ms"])
            values |= charts.spread(curves)
            histograms = [_histogram(f"{tag}_of_ranks", curves[tag]) for tag in charts.HISTOGRAMS]
            self._show(ranks, straggler)
            rows = torch.stack(list(curves.values()), dim=1)[self._shown].tolist()
            for rank, row in zip(self._shown, rows, strict=True):
                self._add(f"rank_{rank:03}", step, dict(zip(curves, row, strict=True)))
        self._add("all", step, values, histograms)
        for number, forward_ms in enumerate(replicas_ms):
            self._add(f"replica_{number:03}", step, {"step_ms/forward": forward_ms})

    def write_page(self, tag: str, step: int, diagnosis: Diagnosis, ranks: Ranks, hosts: Sequence[str] = ()) -> None:
        """Write a verdict on some windows as text, with a table of the parts of a step."""
        page = summary_page(diagnosis, ranks, hosts)
        self._write("all", step, text(tag, page))  # type: ignore[no-untyped-call]
        for logger in self.loggers:
            if hasattr(logger, "add_text"):
                logger.add_text(tag, page, step)

    def write_pictures(self, step: int, ranks: Ranks) -> None:
        """Draw where the steps of each rank go, and who was busy when."""
        figures = {"ranks/parts": bars(ranks)}
        if self._history.steps():
            figures["ranks/busy"] = heat_map(self._history)
        self._write("all", step, Summary(value=[as_value(tag, figure) for tag, figure in figures.items()]))
        for logger in self.loggers:
            if hasattr(logger, "add_figure"):
                for tag, figure in figures.items():
                    logger.add_figure(tag, figure, step)

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers = {}

    def _show(self, ranks: Ranks, straggler: int | None) -> None:
        if not self._shown:
            number = min(len(ranks), self.max_rank_series)
            self._shown = ranks["late"].nan_to_num(0.0).topk(number).indices.tolist()
        if straggler is not None and straggler not in self._shown:
            self._shown.append(straggler)

    def _add(self, run: str, step: int, values: Mapping[str, float], more: Sequence[Summary.Value] = ()) -> None:
        known = {tag: value for tag, value in values.items() if not math.isnan(value)}
        scalars = [Summary.Value(tag=tag, simple_value=value) for tag, value in known.items()]
        self._write(run, step, Summary(value=[*scalars, *more]))
        for logger in self.loggers:
            logger.log_metrics(known if run == "all" else {f"{run}/{tag}": value for tag, value in known.items()}, step)

    def _write(self, run: str, step: int, summary: Summary) -> None:
        if self.folder is None:
            return
        if run not in self._writers:
            self._writers[run] = EventFileWriter(str(self.folder / run), flush_secs=self.flush_s)
        self._writers[run].add_event(Event(wall_time=time.time(), step=step, summary=summary))


def summary_page(diagnosis: Diagnosis, ranks: Ranks, hosts: Sequence[str] = ()) -> str:
    """Markdown: the verdict, and the parts of a step over the ranks."""
    verdict = "\n".join(f"    {line}" for line in diagnosis.lines())
    if diagnosis.rank is not None and hosts:
        verdict += f"\n    rank {diagnosis.rank} runs on {hosts[diagnosis.rank]}"
    rows = ["| part of a step (ms) | least | median | greatest |", "| --- | --- | --- | --- |"]
    for name, part in ranks.parts().items():
        rows.append(f"| {name} | {part.min():.2f} | {part.median():.2f} | {part.max():.2f} |")
    return "\n".join([verdict, "", *rows])


def _histogram(tag: str, values: Tensor) -> Summary.Value:
    counts, edges = np.histogram(values.numpy(), bins=min(30, len(values)))
    proto = HistogramProto(
        min=float(values.min()),
        max=float(values.max()),
        num=len(values),
        sum=float(values.sum()),
        sum_squares=float(values.square().sum()),
        bucket_limit=edges[1:].tolist(),
        bucket=counts.tolist(),
    )
    return Summary.Value(tag=tag, histo=proto)
