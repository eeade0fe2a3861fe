"""Sees the phases of a step where Lightning marks them for profilers; data come before any hook of a callback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch.profilers import Profiler

from project.tracking.device_clock import DeviceClock
from project.tracking.phases import PhaseClock

ACTIONS = (
    # Owner and end of the names that Lightning gives; between them stands a class of the user's.
    ("[_TrainingEpochLoop]", ".train_dataloader_next", "data"),
    ("[Strategy]", ".batch_to_device", "transfer"),
    ("[Strategy]", ".training_step", "forward"),
    ("[Strategy]", ".backward", "backward"),
    ("[LightningModule]", ".optimizer_step", "optimizer"),
)


class PhaseProfiler(Profiler):
    """Runs the clocks, and passes all on to the profiler that the user chose.

    Args:
        inner: That profiler.
        clock: Of the host.
        device_clock: Of the device, where it works on its own time.
        on_step: Called where a step ends and the next starts.
    """

    def __init__(
        self, inner: Profiler, clock: PhaseClock, device_clock: DeviceClock | None, on_step: Callable[[], None]
    ) -> None:
        super().__init__()
        self.inner = inner
        self.clock = clock
        self.device_clock = device_clock
        self.on_step = on_step
        self._phases: dict[str, str | None] = {}

    def start(self, action_name: str) -> None:
        phase = self._phase_of(action_name)
        if phase is not None:
            if phase == "data":
                self.clock.start_step()
                self.on_step()
            elif self.device_clock is not None:
                self.device_clock.enter(phase)
            self.clock.enter(phase)
        self.inner.start(action_name)

    def stop(self, action_name: str) -> None:
        self.inner.stop(action_name)
        phase = self._phase_of(action_name)
        if phase is not None:
            self.clock.leave()
            if phase != "data" and self.device_clock is not None:
                self.device_clock.leave()

    def _phase_of(self, action_name: str) -> str | None:
        if action_name not in self._phases:
            self._phases[action_name] = next(
                (phase for owner, end, phase in ACTIONS if action_name.startswith(owner) and action_name.endswith(end)),
                None,
            )
        return self._phases[action_name]

    def setup(self, *args: Any, **kwargs: Any) -> None:
        self.inner.setup(*args, **kwargs)

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        self.inner.teardown(*args, **kwargs)

    def describe(self) -> None:
        self.inner.describe()

    def summary(self) -> str:
        return self.inner.summary()
