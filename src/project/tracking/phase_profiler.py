"""Sees the phases of a step where Lightning marks them for profilers; data come before any hook of a callback."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning.pytorch.profilers import PassThroughProfiler, Profiler

from project.tracking.arrivals import Marks
from project.tracking.device_clock import DeviceClock
from project.tracking.phases import PhaseClock
from project.tracking.traces import Spans

ACTIONS = (
    # Begin and end of the names that Lightning gives; between them stands a class of the user's, or of ours.
    ("[", ".train_dataloader_next", "data"),
    ("[Strategy]", ".batch_to_device", "transfer"),
    ("[Strategy]", ".training_step", "forward"),
    ("[Strategy]", ".backward", "backward"),
    ("[LightningModule]", ".optimizer_step", "optimizer"),
    ("optimizer_step", "", "optimizer"),  # by manual optimization, whose backward the tracker's hooks mark
)

NOTHING = nullcontext()


class _Marked(AbstractContextManager[None]):
    """An action that is a phase; entered in each step, where a new generator would cost as much as the clocks."""

    def __init__(self, profiler: PhaseProfiler, action_name: str) -> None:
        self.profiler = profiler
        self.action_name = action_name

    def __enter__(self) -> None:
        self.profiler.start(self.action_name)

    def __exit__(self, *_: Any) -> None:
        self.profiler.stop(self.action_name)


class PhaseProfiler(Profiler):
    """Runs the clocks, and passes all on to the profiler that the user chose.

    Args:
        inner: That profiler.
        clock: Of the host.
        marks: Of the wall clock.
        device_clock: Of the device, where it works on its own time.
        on_step: Called where a step ends and the next starts.

    Attributes:
        spans: Of the trace that is being recorded, which then shows the phases.
    """

    def __init__(
        self,
        inner: Profiler,
        clock: PhaseClock,
        marks: Marks,
        device_clock: DeviceClock | None,
        on_step: Callable[[], None],
    ) -> None:
        super().__init__()
        self.inner = inner
        self.clock = clock
        self.marks = marks
        self.device_clock = device_clock
        self.on_step = on_step
        self.spans: Spans | None = None
        self._phases: dict[str, str | None] = {}
        self._contexts: dict[str, AbstractContextManager[Any]] = {}

    def start(self, action_name: str) -> None:
        phase = self._phase_of(action_name)
        if phase is not None:
            if phase == "data":
                self.marks.resume()
                if self.device_clock is not None:
                    self.device_clock.start_step()
                self.clock.start_step()
                self.on_step()
            self.enter(phase)
        self.inner.start(action_name)

    def stop(self, action_name: str) -> None:
        self.inner.stop(action_name)
        phase = self._phase_of(action_name)
        if phase is not None:
            self.leave(phase)

    def profile(self, action_name: str) -> AbstractContextManager[Any]:  # type: ignore[override]
        # Dozens of times in each step, most for hooks that are no phase of their own.
        context = self._contexts.get(action_name)
        if context is None:
            is_phase = self._phase_of(action_name) is not None
            if not is_phase and not isinstance(self.inner, PassThroughProfiler):
                return self.inner.profile(action_name)
            context = self._contexts[action_name] = _Marked(self, action_name) if is_phase else NOTHING
        return context

    def enter(self, phase: str) -> None:
        if self.spans is not None:
            self.spans.enter(phase)
        self.clock.enter(phase)
        if self.clock.phase == "idle":
            return
        if phase == "backward":
            self.marks.begin_backward()
        if self.device_clock is not None and phase != "data":
            self.device_clock.enter(phase)

    def leave(self, phase: str) -> None:
        if self.spans is not None:
            self.spans.leave()
        is_idle = self.clock.phase == "idle"
        self.clock.leave()
        if is_idle:
            return
        if phase == "backward":
            self.marks.end_backward()
        if self.device_clock is not None and phase != "data":
            self.device_clock.leave()

    def pause(self) -> None:
        """What follows is no training, until the next step."""
        self.clock.pause()
        self.marks.pause()

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
