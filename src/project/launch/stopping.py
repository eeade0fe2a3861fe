"""Signals that ask a run to stop: noted when they come, obeyed between two steps, by all ranks at the same one."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# SLURM and spot machines warn with these; Ctrl-C is the third.
NAMES = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT")
SIGNALS = tuple(getattr(signal, name) for name in NAMES if hasattr(signal, name))
EXIT_CODES = {128 + number for number in SIGNALS}
CHECK_EVERY_S = 1.0  # how often the ranks ask each other
TOLD = "stopped by SIGINT"  # of a KeyboardInterrupt: the user has read it
MOST_STEPS = 100  # between two questions, however short they are: later ones may take longer


class Stopped(SystemExit):
    """The run ends because it was asked to; the exit code is 128 and the signal's number, as a shell would say it.

    Args:
        signum: The signal.
        saved: Whether its state lies in a checkpoint, to the last step.
        by_all: Whether all ranks agreed to stop here; else this one left the others where it was.
    """

    def __init__(self, signum: int, saved: bool = False, by_all: bool = False) -> None:
        super().__init__(128 + signum)
        self.signum = signum
        self.saved = saved
        self.by_all = by_all


class Request:
    """What this process was asked by signals.

    A signal outside of training has nothing to wait for, and ends the process where it is.
    """

    def __init__(self) -> None:
        self.signum = 0
        self.deferred = False  # training is under way, and looks here between its steps
        self.insistent = False  # a second Ctrl-C ends the process at once
        self.has_insisted = False
        self.failure: Exception | None = None  # raised in place of a stop, where the next signal finds the process

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if self.failure is not None:
            raise self.failure
        again = self.signum != 0
        self.signum = self.signum or signum
        if self.deferred and not (again and self.insistent and signum == signal.SIGINT):
            return
        self.has_insisted = self.deferred  # it has not come to the end of its step, and may not come to its own
        if signum == signal.SIGINT and self.insistent:
            raise KeyboardInterrupt
        raise Stopped(signum)


REQUEST = Request()  # one for the process, as signals are


@contextmanager
def listening(insistent: bool = False) -> Iterator[None]:
    """Note the signals that ask to stop; afterwards they do what they did before.

    ``insistent``: nobody else looks after this process, so that a second Ctrl-C must end it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread of a process can listen
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    REQUEST.insistent = insistent
    for number in SIGNALS:
        signal.signal(number, REQUEST)
    try:
        yield
    finally:
        # A later training of this process was asked nothing.
        REQUEST.signum, REQUEST.deferred, REQUEST.has_insisted, REQUEST.failure = 0, False, False, None
        for number, handler in before.items():
            signal.signal(number, handler)


class Agreement:
    """Asks all ranks, about once a second, whether one of them was told to stop.

    Ranks must come here after the same steps. How many steps there are to the next question follows from the
    slowest rank's step, so that between two of them no rank waits for another.

    Attributes:
        elapsed_s: Seconds on a clock that all ranks read alike, as of the last question.
    """

    def __init__(self, world_size: int) -> None:
        self.elapsed_s = 0.0
        self._started_at = time.monotonic()
        self._paces: dict[str, _Pace] = {}
        self._group = None
        if world_size > 1:
            import torch.distributed as dist

            from project.tracking.arrivals import OWN_GROUP

            # Of its own, on the CPU: what it sends waits for no kernel, and is no part of what is measured.
            self._group = dist.new_group(backend="gloo", group_desc=OWN_GROUP)

    def asked(self, stage: str = "train", now: bool = False) -> int:
        """The signal that a rank was sent, on all ranks alike; 0 where none was, or where it is too early to ask.

        Each ``stage`` has a pace of its own, since the batches of a validation are faster than steps. ``now`` asks
        at once.
        """
        if self._group is None:
            self.elapsed_s = time.monotonic() - self._started_at
            return REQUEST.signum
        pace = self._paces.setdefault(stage, _Pace())
        pace.steps_left -= 1
        if pace.steps_left > 0 and not now:
            return 0
        import torch
        import torch.distributed as dist

        now_s = time.monotonic() - self._started_at
        told = torch.tensor([REQUEST.signum, now_s, pace.step_s(now_s)], dtype=torch.float64)
        dist.all_reduce(told, dist.ReduceOp.MAX, group=self._group)
        signum, self.elapsed_s, step_s = told.tolist()
        pace.next(self.elapsed_s, step_s)
        return int(signum)


class _Pace:
    """After how many steps to ask again."""

    def __init__(self) -> None:
        self.steps = self.steps_left = 1
        self.asked_at_s: float | None = None

    def step_s(self, now_s: float) -> float:
        return CHECK_EVERY_S if self.asked_at_s is None else (now_s - self.asked_at_s) / self.steps

    def next(self, now_s: float, step_s: float) -> None:
        self.asked_at_s = now_s
        self.steps = self.steps_left = max(1, min(MOST_STEPS, int(CHECK_EVERY_S / max(step_s, 1e-6))))
