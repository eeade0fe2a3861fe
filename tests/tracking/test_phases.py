"""The time of a step is shared out among its phases."""

import pytest

from project.tracking.phases import PHASES, PhaseClock


class Time:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        return self.ns


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def clock(time: Time) -> PhaseClock:
    return PhaseClock(time)


def spend(clock: PhaseClock, time: Time, phase: str, ns: int) -> None:
    clock.enter(phase)
    time.ns += ns
    clock.leave()


def test_phases_sum_to_the_steps(clock: PhaseClock, time: Time) -> None:
    for step in (1, 2, 3):
        clock.start_step()
        spend(clock, time, "data", 10 * step)
        time.ns += 1
        spend(clock, time, "forward", 100)
    clock.start_step()
    totals, steps = clock.take()
    assert totals == dict.fromkeys(PHASES, 0) | {"data": 60, "forward": 300, "other": 3}
    assert steps == [111, 121, 131]
    assert sum(totals.values()) == sum(steps)


def test_time_within_an_inner_phase_is_not_the_outers(clock: PhaseClock, time: Time) -> None:
    clock.start_step()
    clock.enter("optimizer")
    time.ns += 1
    spend(clock, time, "forward", 10)
    spend(clock, time, "backward", 100)
    time.ns += 1
    clock.leave()
    clock.start_step()
    totals, _ = clock.take()
    assert (totals["optimizer"], totals["forward"], totals["backward"]) == (2, 10, 100)


def test_what_happens_while_the_clock_stands_still_is_no_training(clock: PhaseClock, time: Time) -> None:
    clock.start_step()
    spend(clock, time, "forward", 5)
    clock.pause()
    spend(clock, time, "transfer", 1000)
    assert clock.phase == "idle"
    clock.start_step()
    time.ns += 7
    clock.start_step()
    totals, steps = clock.take()
    assert steps == [5, 7]
    assert totals["transfer"] == 0


def test_a_window_begins_anew(clock: PhaseClock, time: Time) -> None:
    clock.start_step()
    spend(clock, time, "data", 5)
    clock.start_step()
    clock.take()
    spend(clock, time, "forward", 3)
    clock.start_step()
    assert clock.take() == (dict.fromkeys(PHASES, 0) | {"forward": 3}, [3])


def test_the_phase_that_runs_is_told(clock: PhaseClock) -> None:
    assert clock.phase == "idle"
    clock.start_step()
    assert clock.phase == "other"
    clock.enter("optimizer")
    clock.enter("backward")
    assert clock.phase == "backward"
    clock.leave()
    assert clock.phase == "optimizer"
