"""Where the wall time of a rank's training steps goes. Pure Python: knows neither Lightning nor torch."""

from __future__ import annotations

import time
from collections.abc import Callable

# In the order of a step. "buffers" is DDP's broadcast of buffers, which begins forward where there is batch norm;
# "shards" is FSDP's exchange of weights and gradients, within forward and backward, where it is known: on the CPU;
# "other" is what no phase claims: the loop itself, callbacks, logging.
PHASES = ("data", "transfer", "buffers", "shards", "forward", "backward", "optimizer", "other")


class PhaseClock:
    """Shares the time out among phases that may lie within each other: at each moment the innermost one runs.

    So the phases of a step sum to its wall time by construction. Times are in nanoseconds.

    Args:
        now: The clock, in nanoseconds; monotonic.
    """

    def __init__(self, now: Callable[[], int] = time.perf_counter_ns) -> None:
        self._now = now
        self._open: list[str] = []
        self._since: int | None = None  # None while the clock stands still
        self.totals: dict[str, int] = dict.fromkeys(PHASES, 0)
        self.steps: list[int] = []  # wall time of each finished step
        self._step = 0

    @property
    def phase(self) -> str:
        """What runs now, ``idle`` while the clock stands still."""
        if self._since is None:
            return "idle"
        return self._open[-1] if self._open else "other"

    def start_step(self) -> None:
        """End the step before, and begin the next, also where the clock stood still."""
        if self._since is not None:
            self._share_out()
        if self._step:
            self.steps.append(self._step)
        self._step = 0
        self._since = self._now()

    def enter(self, phase: str) -> None:
        if self._since is not None:
            self._share_out()
        self._open.append(phase)

    def leave(self) -> None:
        if self._since is not None:
            self._share_out()
        if self._open:
            self._open.pop()

    def pause(self) -> None:
        """Stand still until the next step: what follows is no training, as validation or a checkpoint."""
        if self._since is not None:
            self._share_out()
            self._since = None

    def take(self) -> tuple[dict[str, int], list[int]]:
        """Totals of the phases and the steps since the last call, which begin anew. Call it where a step starts."""
        totals, steps = self.totals, self.steps
        self.totals, self.steps = dict.fromkeys(PHASES, 0), []
        return totals, steps

    def _share_out(self) -> None:
        assert self._since is not None
        now = self._now()
        elapsed = now - self._since
        self._since = now
        self.totals[self._open[-1] if self._open else "other"] += elapsed
        self._step += elapsed
