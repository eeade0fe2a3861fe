"""When a rank came to what ranks do together, from torch's flight recorder, whatever the strategy."""

from __future__ import annotations

import math
import pickle
import time
import zlib
from bisect import bisect
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

KEPT = 128  # the last collectives of a window
MARKED = 1024  # the last backward passes of a window
NUM_ARRIVALS = 1 + 2 * KEPT  # numbers that a rank packs
OWN_GROUP = "tracking"  # whose collectives are not looked at


class Marks:
    """Times, by `time.time_ns`, between which training stood still and backward ran, since the window began."""

    def __init__(self, now: Callable[[], int] = time.time_ns) -> None:
        self._now = now
        self.begin_window()

    def begin_window(self) -> None:
        self.since_ns = self._now()
        self.still: list[int] = []  # begin and end in turns
        self.backward: deque[tuple[int, int]] = deque(maxlen=MARKED)
        self._backward_since: int | None = None

    def pause(self) -> None:
        if len(self.still) % 2 == 0:
            self.still.append(self._now())

    def resume(self) -> None:
        if len(self.still) % 2:
            self.still.append(self._now())

    def begin_backward(self) -> None:
        self._backward_since = self._now()

    def end_backward(self) -> None:
        if self._backward_since is not None:
            self.backward.append((self._backward_since, self._now()))
            self._backward_since = None

    def backward_of(self, time_ns: int) -> int | None:
        """Which backward pass ran then, as a number; None between two of them, or where that is long ago."""
        number = bisect(self.backward, time_ns, key=lambda span: span[0]) - 1
        return number if number >= 0 and time_ns <= self.backward[number][1] else None


@dataclass(frozen=True)
class Arrivals:
    """The last `KEPT` collectives of training in a window, or fewer.

    Attributes:
        program: A number of their kinds and order, the same on ranks that run the same program; NaN without any.
        came_s: When this rank came to each, in seconds since 1970.
        groups: A number of the ranks that meet in each.
        waits: Whether the rank waits for the others at each but the last before it goes on.
        follows: Whether all between each and the next was training.
    """

    program: float = math.nan
    came_s: tuple[float, ...] = ()
    groups: tuple[float, ...] = ()
    waits: tuple[bool, ...] = ()
    follows: tuple[bool, ...] = ()

    def packed(self) -> list[float]:
        """Numbers for one row of a tensor, `NUM_ARRIVALS` of them; float64 holds today to 0.2 microseconds."""
        unknown = [math.nan] * (KEPT - len(self.came_s))
        return [self.program, *self.came_s, *unknown, *self.groups, *unknown]

    def of_all(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None] | None:
        """What `lateness` takes, from the packed rows of all ranks, (R, NUM_ARRIVALS), this one's among them.

        None where nothing is known, or the ranks did not do the same.
        """
        if not (rows[:, 0] == self.program).all():  # nor is NaN
            return None
        number = len(self.came_s)
        groups: Tensor | None = rows[:, 1 + KEPT : 1 + KEPT + number]
        if (groups == groups[0]).all():  # type: ignore[index, union-attr]
            groups = None
        return rows[:, 1 : 1 + number], torch.tensor(self.waits), torch.tensor(self.follows), groups


def arrivals(marks: Marks) -> Arrivals:
    """The collectives since the window began, but for those while training stood still.

    Nothing where nothing is known: the recorder is private to torch, and may be off (TORCH_FR_BUFFER_SIZE=0). Costs
    about 15 microseconds for each entry; the launcher keeps it short.
    """
    dump = _dump() if dist.is_initialized() else None
    if dump is None:
        return Arrivals()
    entries = []
    try:
        # Collectives, no stack traces, also those that are over; as JSON it takes twice as long.
        for entry in pickle.loads(dump(True, False, False))["entries"]:
            group, description = entry["process_group"]
            time_ns = int(entry["time_created_ns"])
            trained = time_ns > marks.since_ns and bisect(marks.still, time_ns) % 2 == 0
            if trained and description != OWN_GROUP and not entry["is_p2p"]:
                entries.append((time_ns, str(entry["profiling_name"]), int(entry["collective_seq_id"]), str(group)))
    except (KeyError, TypeError, ValueError, RuntimeError, pickle.UnpicklingError):
        return Arrivals()
    return of_entries(sorted(entries)[-KEPT:], marks)


def of_entries(entries: list[tuple[int, str, int, str]], marks: Marks) -> Arrivals:
    """Arrivals from entries of the recorder: nanoseconds, kind, number within the group, and group of each."""
    if not entries:
        return Arrivals()
    pairs = [(before, after) for before, after in pairwise(entries)]
    return Arrivals(
        program=_number(" ".join(f"{kind} {number}" for _, kind, number, _ in entries)),
        came_s=tuple(time_ns / 1e9 for time_ns, *_ in entries),
        groups=tuple(_number(group) for *_, group in entries),
        waits=tuple(not _in_one_backward(before, after, marks) for before, after in pairs),
        follows=tuple(bisect(marks.still, a[0]) == bisect(marks.still, b[0]) for a, b in pairs),
    )


def _in_one_backward(before: tuple[int, str, int, str], after: tuple[int, str, int, str], marks: Marks) -> bool:
    """Whether both are gradients that DDP sends while it computes the next: it waits where backward ends."""
    both = before[1].endswith("all_reduce") and after[1].endswith("all_reduce")
    place = marks.backward_of(before[0])
    return both and place is not None and place == marks.backward_of(after[0])


def _number(text: str) -> float:
    return float(zlib.crc32(text.encode()))


def _dump() -> Any:
    """The recorder of the ranks' backend: NCCL has one of its own, and the other would tell of our own groups alone."""
    try:
        from torch._C import _distributed_c10d
    except ImportError:
        return None
    return getattr(_distributed_c10d, "_dump_nccl_trace" if dist.get_backend() == "nccl" else "_dump_fr_trace", None)
