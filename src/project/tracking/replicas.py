"""The replicas of `dp`, which share one process: how long each takes for its forward."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from project.tracking.device_clock import DeviceClock


class Replicas:
    """What `DataParallelStrategy.observe_replica` calls; each replica's forward, on its device's own time on CUDA."""

    def __init__(self) -> None:
        self._host_ms: dict[int, float] = {}
        self._clocks: dict[int, DeviceClock] = {}

    @contextmanager
    def observe(self, index: int, device: torch.device) -> Iterator[None]:
        if not torch.is_grad_enabled():  # validation
            yield
        elif device.type == "cuda":
            clock = self._clocks.setdefault(index, DeviceClock())
            clock.enter("forward")
            try:
                yield
            finally:
                clock.leave()
        else:
            start = time.perf_counter()
            try:
                yield
            finally:
                self._host_ms[index] = self._host_ms.get(index, 0.0) + 1e3 * (time.perf_counter() - start)

    def take(self, steps: int) -> list[float]:
        """Milliseconds of forward in a step, by replica, since the last call."""
        on_device = {index: clock.take().get("forward", 0.0) for index, clock in self._clocks.items()}
        totals, self._host_ms = self._host_ms | on_device, {}
        return [totals[index] / max(1, steps) for index in sorted(totals)]
