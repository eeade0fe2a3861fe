"""What each rank is doing, in memory that the launching process reads: written in a microsecond, without a message."""

from __future__ import annotations

import mmap
import struct
import time
from dataclasses import dataclass
from pathlib import Path

RECORD = struct.Struct("<qqq")  # step, phase, monotonic nanoseconds, a clock that the processes of a host share
AT_REST = "is between two stages"  # nobody waits for it to go on
PHASES = (AT_REST, "waits for data", "computes", "validates", "saves a checkpoint", "tests", "predicts")


class Beat:
    """Notes where this process is; does nothing in one that nobody watches."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._offset = 0

    def start(self, path: Path, rank: int) -> None:
        """Write to a rank's place in the launching process's file."""
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._offset = rank * RECORD.size

    def start_alone(self) -> None:
        """Write to memory of this process's own: it looks after itself."""
        self._memory, self._offset = mmap.mmap(-1, RECORD.size), 0

    def end(self) -> None:
        """Nobody watches any more."""
        self._memory = None

    def __call__(self, step: int, phase: str) -> None:
        if self._memory is not None:
            RECORD.pack_into(self._memory, self._offset, step, PHASES.index(phase), time.monotonic_ns())

    def signs(self) -> list[Sign]:
        """Of all ranks of this host that are at work; none where nobody watches."""
        return [] if self._memory is None else _signs(self._memory[:])

    def rest(self) -> None:
        """From here on the rank may take its time."""
        self(0, AT_REST)


BEAT = Beat()  # one for the process


@dataclass(frozen=True)
class Sign:
    """The last sign of life of a rank."""

    rank: int
    step: int
    phase: str
    age_s: float

    def __str__(self) -> str:
        return f"rank {self.rank} {self.phase} in step {self.step} for {self.age_s:.0f} s"


class Heartbeats:
    """The launching process's side: a file of one record for each rank."""

    def __init__(self, path: Path, num_ranks: int) -> None:
        self.path = path
        self.num_ranks = num_ranks
        self.clear()

    def clear(self) -> None:
        """Forget the signs of ranks that have ended; in a new file, since they may still write to theirs."""
        self.path.unlink(missing_ok=True)
        self.path.write_bytes(bytes(RECORD.size * self.num_ranks))

    def read(self) -> list[Sign]:
        """Of ranks that are at work."""
        return _signs(self.path.read_bytes())


def _signs(records: bytes) -> list[Sign]:
    now = time.monotonic_ns()
    return [
        Sign(rank, step, PHASES[phase], (now - at) / 1e9)
        for rank, (step, phase, at) in enumerate(RECORD.iter_unpack(records))
        if phase
    ]


def describe_hang(culprit: Sign, signs: list[Sign], is_stopped: bool) -> str:
    """Which rank hangs, and where the others are."""
    others = "; ".join(str(sign) for sign in signs if sign.rank != culprit.rank)
    how = ", its process is stopped (SIGSTOP)" if is_stopped else ""
    return (
        f"rank {culprit.rank} hangs: it {culprit.phase} in step {culprit.step} for {culprit.age_s:.0f} s{how}"
        + (f" ({others})" if others else "")
        + "; what each rank was doing stands at the end of its log; if it only takes longer, type "
        "launch.hang_timeout_s=3600"
    )
