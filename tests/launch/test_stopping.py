"""What a signal means to a process, before, during and after training."""

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from project.launch.stopping import CHECK_EVERY_S, EXIT_CODES, MOST_STEPS, REQUEST, Agreement, Stopped, _Pace, listening


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)] == before


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def test_signal_outside_of_training_ends_the_process_at_once() -> None:
    with listening(), pytest.raises(Stopped) as info:
        send(signal.SIGTERM)
    assert (info.value.code, info.value.saved) == (143, False)
    assert {143, 138, 140, 130} == EXIT_CODES


def test_signal_during_training_waits_for_the_end_of_a_step() -> None:
    with listening():
        REQUEST.deferred = True
        agreement = Agreement(world_size=1)
        assert agreement.asked() == 0
        send(signal.SIGUSR1)
        send(signal.SIGTERM)
        assert agreement.asked() == signal.SIGUSR1  # the first one says why
    assert not REQUEST.deferred
    assert not REQUEST.signum


@pytest.mark.parametrize("insistent", [True, False])
def test_second_ctrl_c_ends_at_once_where_nobody_else_would(insistent: bool) -> None:
    with listening(insistent):
        REQUEST.deferred = True
        send(signal.SIGINT)
        if insistent:
            with pytest.raises(KeyboardInterrupt):
                send(signal.SIGINT)
        else:
            send(signal.SIGINT)
        assert REQUEST.signum == signal.SIGINT


def test_other_threads_leave_signals_alone() -> None:
    def run() -> None:
        with listening():
            pass

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def test_ranks_ask_each_other_about_once_a_second() -> None:
    pace = _Pace()
    assert pace.steps == 1  # the first step may be the last for long
    assert pace.step_s(10.0) == CHECK_EVERY_S
    pace.next(10.0, 0.05)
    assert pace.steps == pace.steps_left == 20
    assert pace.step_s(11.0) == pytest.approx(0.05)
    pace.next(11.0, 0.0)
    assert pace.steps == MOST_STEPS
    pace.next(12.0, 30.0)
    assert pace.steps == 1
