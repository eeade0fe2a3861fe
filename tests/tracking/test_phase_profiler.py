"""The names that Lightning gives to what it does, as phases."""

import pytest
from lightning.pytorch.profilers import PassThroughProfiler, Profiler, SimpleProfiler

from project.tracking.arrivals import Marks
from project.tracking.device_clock import DeviceClock
from project.tracking.phase_profiler import PhaseProfiler
from project.tracking.phases import PhaseClock

STEP = (
    ("[_TrainingEpochLoop].train_dataloader_next", "data"),
    ("[Strategy]DDPStrategy.batch_to_device", "transfer"),
    ("[Strategy]MyStrategy.training_step", "forward"),
    ("[Strategy]DDPStrategy.backward", "backward"),
    ("[LightningModule]MyModel.optimizer_step", "optimizer"),
    ("optimizer_step", "optimizer"),  # by manual optimization
)


class Clocks:
    """A profiler and what it runs, on a time that a test moves."""

    def __init__(self, inner: Profiler | None = None, device_clock: DeviceClock | None = None) -> None:
        self.ns = 0
        self.clock, self.marks = PhaseClock(lambda: self.ns), Marks(lambda: self.ns)
        self.steps = 0
        self.profiler = PhaseProfiler(
            inner or PassThroughProfiler(), self.clock, self.marks, device_clock, self._on_step
        )

    def _on_step(self) -> None:
        self.steps += 1

    def spend(self, action: str, ns: int = 5) -> None:
        with self.profiler.profile(action):
            self.ns += ns


@pytest.fixture
def clocks() -> Clocks:
    clocks = Clocks()
    clocks.spend(STEP[0][0], 0)
    return clocks


@pytest.mark.parametrize(("action", "phase"), STEP[1:])
def test_an_action_is_its_phase(clocks: Clocks, action: str, phase: str) -> None:
    clocks.spend(action)
    clocks.clock.start_step()
    assert {name: ns for name, ns in clocks.clock.take()[0].items() if ns} == {phase: 5}


@pytest.mark.parametrize("loop", ["_TrainingEpochLoop", "EpochLoop"])
def test_waiting_for_a_batch_begins_a_step_whatever_the_loop_is_called(loop: str) -> None:
    clocks = Clocks()
    for _ in range(3):
        clocks.spend(f"[{loop}].train_dataloader_next")
    assert clocks.steps == 3
    assert clocks.clock.take() == (dict.fromkeys(clocks.clock.totals, 0) | {"data": 15}, [5, 5])


@pytest.mark.parametrize(
    "action",
    [
        "[_EvaluationLoop].val_next",
        "[Callback]Mine.on_train_batch_end",
        "[Strategy]DDPStrategy.validation_step",
        "else",
    ],
)
def test_anything_else_is_other(clocks: Clocks, action: str) -> None:
    clocks.spend(action)
    clocks.clock.start_step()
    assert {name: ns for name, ns in clocks.clock.take()[0].items() if ns} == {"other": 5}


def test_the_users_profiler_sees_all() -> None:
    inner = SimpleProfiler()
    clocks = Clocks(inner)
    for action in (STEP[0][0], STEP[2][0], "[Callback]Mine.on_train_batch_end"):
        clocks.spend(action)
    assert set(inner.recorded_durations) == {STEP[0][0], STEP[2][0], "[Callback]Mine.on_train_batch_end"}


def test_backward_is_marked_on_the_clock_on_the_wall(clocks: Clocks) -> None:
    clocks.spend("[Strategy]DDPStrategy.backward")
    assert list(clocks.marks.backward) == [(0, 5)]


class Event:
    def record(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "Event") -> float:
        return 1.0


def test_a_device_is_not_timed_while_the_clock_stands_still() -> None:
    device_clock = DeviceClock(Event)
    clocks = Clocks(device_clock=device_clock)
    clocks.spend("[Strategy]DDPStrategy.batch_to_device")  # of the sanity check
    clocks.spend(STEP[0][0])
    clocks.spend("[Strategy]DDPStrategy.batch_to_device")
    clocks.profiler.pause()
    clocks.spend("[Strategy]DDPStrategy.batch_to_device")  # of validation
    assert device_clock.take() == {"transfer": 1.0}


def test_what_stopped_the_clock_within_a_phase_leaves_none_open() -> None:
    """As a checkpoint does that a training step writes."""
    device_clock = DeviceClock(Event)
    clocks = Clocks(device_clock=device_clock)
    clocks.spend(STEP[0][0])
    clocks.profiler.start("[Strategy]DDPStrategy.training_step")
    clocks.profiler.pause()
    clocks.profiler.stop("[Strategy]DDPStrategy.training_step")
    clocks.spend(STEP[0][0])
    clocks.spend("[Strategy]DDPStrategy.backward")
    assert clocks.clock.phase == "other"
    assert device_clock.take() == {"forward": 1.0, "backward": 1.0}
