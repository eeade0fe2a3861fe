"""How long a device works on each phase: by events that are read when they have passed, never by waiting."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch


def cuda_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class DeviceClock:
    """Adds up the time between pairs of events, in milliseconds by phase.

    Phases may lie within each other: at each moment the innermost one runs, as in `PhaseClock`. Events are pooled,
    because making one costs more than recording it.

    Args:
        make_event: Events with `record`, `query` and `elapsed_time`, as CUDA's.
    """

    def __init__(self, make_event: Callable[[], Any] = cuda_event) -> None:
        self._make_event = make_event
        self._pool: list[Any] = []
        self._open: list[str] = []
        self._since: Any = None  # the event at which the innermost phase began, or went on
        self._pending: deque[tuple[str, Any, Any]] = deque()
        self.totals_ms: dict[str, float] = {}

    def start_step(self) -> None:
        """Close what is open: a phase in which the clock was stopped, as by a checkpoint within a step."""
        self._close()
        self._open = []

    def enter(self, phase: str) -> None:
        self._close()
        self._open.append(phase)
        self._since = self._mark()

    def leave(self) -> None:
        self._close()
        if self._open:
            self._open.pop()
        if self._open:  # the outer phase goes on
            self._since = self._mark()

    def take(self) -> dict[str, float]:
        """What has passed since the last call; what is still under way is told later."""
        while self._pending and self._pending[0][2].query():
            phase, start, end = self._pending.popleft()
            self.totals_ms[phase] = self.totals_ms.get(phase, 0.0) + start.elapsed_time(end)
            self._pool += (start, end)
        totals, self.totals_ms = self.totals_ms, {}
        return totals

    def drop(self) -> None:
        """Forget what was measured until now, also what is still under way."""
        for _, start, end in self._pending:
            self._pool += (start, end)
        self._pending.clear()
        self.totals_ms = {}

    def _close(self) -> None:
        if self._since is not None:
            self._pending.append((self._open[-1], self._since, self._mark()))
            self._since = None

    def _mark(self) -> Any:
        event = self._pool.pop() if self._pool else self._make_event()
        event.record()
        return event


def on_device(host_ns: dict[str, int], device_ms: dict[str, float]) -> dict[str, int]:
    """The phases of steps on a device, from what host and device measured; the sum stays that of the host.

    The host queues work and goes on, so its times of forward, backward and optimizer are those of queueing. The
    device's are taken for them. In the rest the device was idle: first because the host waited for data, as long as
    it did, else because the host had nothing queued.
    """
    wall = sum(host_ns.values())
    phases = {name: int(device_ms.get(name, 0.0) * 1e6) for name in host_ns if name not in ("data", "other")}
    busy = sum(phases.values())
    if busy > wall:  # work of one window that passed in the next
        phases = {name: int(value * wall / busy) for name, value in phases.items()}
        busy = sum(phases.values())
    data = min(host_ns["data"], wall - busy)
    return {name: phases.get(name, 0) for name in host_ns} | {"data": data, "other": wall - busy - data}
