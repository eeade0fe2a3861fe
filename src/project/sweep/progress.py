"""How far a sweep is, on the console: a line for each job that ends, and one of the whole."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from project.launch.summary import readable, shorten
from project.sweep.pace import seconds_left
from project.sweep.record import Sweep
from project.sweep.results import Row, ranked, row_of

ENDED = ("finished", "pruned", "failed", "interrupted", "killed")
MOST_METRICS = 3  # of a job that is not compared by any


class Progress:
    """Watches the run folders of a sweep's jobs from a thread, while a launcher waits for them.

    Launchers tell nothing before all their jobs have ended, wherever these run; the folders do.
    """

    def __init__(self, sweep: Sweep, interval_s: float = 0.5) -> None:
        self._sweep = sweep
        self._interval_s = interval_s
        self._ended: dict[int, Row] = {}
        self._running: list[Row] = []
        self._at_once = 1
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._earlier = {row.number for row in self._look()}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._tell(self._look())

    def line(self) -> str:
        """Done, running, failed, best so far, time remaining; each job counts once."""
        sweep = self._sweep
        rows = list(self._ended.values())
        parts = [f"{sum(one.state == 'finished' for one in rows)} of {sweep.total} done"]
        for count, what in (
            (len(self._running), "running"),
            (sum(one.state == "pruned" for one in rows), "pruned"),
            (sum(one.state in ("interrupted", "killed") for one in rows), "interrupted"),
            (sum(one.state == "failed" for one in rows), "failed"),
        ):
            if count:
                parts.append(f"{count} {what}")
        text = "sweep: " + ", ".join(parts)
        if best := ranked(rows, sweep.objectives):
            text += f"; best {_values(best[0], sweep)} ({best[0].name or best[0].number})"
        return text + self._time_left(sweep.total - len(rows))

    def _time_left(self, unfinished: int) -> str:
        of_this_start = [row for number, row in self._ended.items() if number not in self._earlier]
        left = seconds_left(of_this_start, self._running, unfinished - len(self._running), self._at_once)
        if unfinished <= 0 or left is None:
            return ""
        return f"; {'at most' if left.is_bound else 'about'} {_span(left.seconds)} left"

    def _watch(self) -> None:
        while not self._stop.wait(self._interval_s):
            if ended := self._look():
                self._tell(ended)
                import project.sweep.figures  # noqa: F401  (while the jobs leave this process idle)

    def _tell(self, ended: Sequence[Row]) -> None:
        for row in ended:
            print(job_line(row, self._sweep))
        if ended:
            print(self.line(), flush=True)

    def _look(self) -> list[Row]:
        """Read the folders of jobs that have not ended; those that have since the last look."""
        found = [row_of(job, self._sweep) for job in list(self._sweep.jobs) if job.number not in self._ended]
        ended = [row for row in found if row.state in ENDED]
        self._ended |= {row.number: row for row in ended}
        self._running = [row for row in found if row.state == "running"]
        self._at_once = max(self._at_once, len(self._running))
        return ended


def job_line(row: Row, sweep: Sweep) -> str:
    """One job: its number, what varies, what came of it, how long it took, and its folder."""
    name = f" ({row.name})" if row.name else ""
    came = _values(row, sweep) if row.state == "finished" else f"{row.state}: {row.error}" if row.error else row.state
    took = _span(row.duration_s) if row.duration_s is not None and row.state != "failed" else ""
    parts = [part for part in (came, took, f"in {shorten(row.folder)}") if part]
    return f"job {row.number}{name}: {', '.join(parts)}"


def _values(row: Row, sweep: Sweep) -> str:
    """What a job is compared by; where it is by nothing, the first of its metrics."""
    named = dict(zip(sweep.objectives, row.objectives, strict=True)) or dict(list(row.metrics.items())[:MOST_METRICS])
    return ", ".join(f"{name} {readable(value)}" for name, value in named.items() if value is not None)


def _span(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
