"""How long the rest of a sweep takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from project.sweep.results import Row


@dataclass(frozen=True)
class Left:
    """Seconds until all jobs have ended; ``is_bound`` where it is less, since known jobs had to import all first."""

    seconds: float
    is_bound: bool


def seconds_left(ended: Sequence[Row], running: Sequence[Row], waiting: int, at_once: int) -> Left | None:
    """What is left, by the jobs that took the place of another; None where none has come to its end yet.

    A job's cost is counted from the end of the last one before it, whose place it took. That includes what the launcher
    does in between, and not the start-up that the first jobs have waited for; those tell while there are no others.

    Args:
        ended: Jobs that have ended since the sweep was started.
        running: Jobs that are under way.
        waiting: Number of jobs that have not begun.
        at_once: Jobs that run at the same time.
    """
    ends = [row.started_at + row.duration_s for row in ended if row.started_at and row.duration_s is not None]
    successors, first = [], []
    for row in ended:
        if row.state not in ("finished", "pruned") or row.started_at is None or row.duration_s is None:
            continue
        waited_s = [row.started_at - end for end in ends if end <= row.started_at]
        if waited_s:
            successors.append(min(waited_s) + row.duration_s)
        else:
            first.append(row.duration_s)
    if not (successors or first):
        return None
    job_s = fmean(successors or first)
    rests_s = [max(0.0, job_s - (row.duration_s or 0.0)) for row in running]
    longest_s = job_s if waiting else max(rests_s, default=0.0)
    seconds = max((waiting * job_s + sum(rests_s)) / at_once, longest_s)
    return Left(seconds, is_bound=not successors)
