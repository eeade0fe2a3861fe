"""How far a sweep is, on the console: a line whenever a job ends."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Self

from project.launch.summary import readable
from project.sweep.record import Sweep
from project.sweep.results import Row, ranked, row_of

ENDED = ("finished", "pruned", "failed", "interrupted", "killed")


class Progress:
    """Watches the run folders of a sweep's jobs from a thread, while a launcher waits for them.

    Launchers tell nothing before all their jobs have ended, wherever these run; the folders do.
    """

    def __init__(self, sweep: Sweep, interval_s: float = 0.5) -> None:
        self._sweep = sweep
        self._interval_s = interval_s
        self._ended: dict[int, Row] = {}
        self._running = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._look()
        self._begun_at = time.monotonic()
        self._earlier = len(self._ended)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        if self._look():
            print(self.line(), flush=True)

    def line(self) -> str:
        """Done, running, failed, best so far, time remaining."""
        sweep = self._sweep
        rows = list(self._ended.values())
        done = sum(one.state in ("finished", "pruned", "failed") for one in rows)
        parts = [f"{done} of {sweep.total} done"]
        for count, what in (
            (self._running, "running"),
            (sum(one.state == "pruned" for one in rows), "pruned"),
            (sum(one.state in ("interrupted", "killed") for one in rows), "interrupted"),
            (sum(one.state == "failed" for one in rows), "failed"),
        ):
            if count:
                parts.append(f"{count} {what}")
        text = "sweep: " + ", ".join(parts)
        if best := ranked(rows, sweep.objectives):
            values = ", ".join(
                f"{name} {readable(value)}"
                for name, value in zip(sweep.objectives, best[0].objectives, strict=True)
                if value is not None
            )
            text += f"; best {values} ({best[0].name or best[0].number})"
        new, left = len(rows) - self._earlier, sweep.total - len(rows)
        if new and left > 0:
            text += f"; about {_span((time.monotonic() - self._begun_at) / new * left)} left"
        return text

    def _watch(self) -> None:
        while not self._stop.wait(self._interval_s):
            if self._look():
                print(self.line(), flush=True)
                import project.sweep.figures  # noqa: F401  (while the jobs leave this process idle)

    def _look(self) -> bool:
        """Read the folders of jobs that have not ended; whether one has since the last look."""
        found, self._running = False, 0
        for job in list(self._sweep.jobs):
            if job.number in self._ended:
                continue
            now = row_of(job, self._sweep)
            if now.state in ENDED:
                self._ended[job.number] = now
                found = True
            self._running += now.state == "running"
        return found


def _span(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
