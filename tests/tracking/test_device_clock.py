"""Device time is read when it has passed, and takes the place of the host's."""

import pytest
import torch

from project.tracking.device_clock import DeviceClock, on_device
from project.tracking.phases import PHASES


class Device:
    """A queue that a test lets pass; events note when their turn came."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.made = 0

    def event(self) -> "Event":
        self.made += 1
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.at_ms = 0.0
        self.passed = False

    def record(self) -> None:
        self.at_ms, self.passed = self.device.now_ms, False

    def query(self) -> bool:
        return self.passed

    def elapsed_time(self, end: "Event") -> float:
        return end.at_ms - self.at_ms


def spend(clock: DeviceClock, device: Device, ms: float) -> None:
    clock.enter("forward")
    device.now_ms += ms
    clock.leave()


def let_pass(clock: DeviceClock) -> None:
    for _, start, end in clock._pending:
        start.passed = end.passed = True


def test_time_is_told_once_the_device_has_passed_and_events_are_used_again() -> None:
    device = Device()
    clock = DeviceClock(device.event)
    for _ in range(5):
        spend(clock, device, 3)
        assert clock.take() == {}  # still under way
        let_pass(clock)
        assert clock.take() == {"forward": 3}
    assert device.made == 2


def test_time_within_an_inner_phase_is_not_the_outers() -> None:
    device = Device()
    clock = DeviceClock(device.event)
    clock.enter("optimizer")
    device.now_ms += 1
    clock.enter("forward")
    device.now_ms += 5
    clock.leave()
    clock.enter("backward")
    device.now_ms += 7
    clock.leave()
    device.now_ms += 2
    clock.leave()
    let_pass(clock)
    assert clock.take() == {"forward": 5, "backward": 7, "optimizer": 3}


def test_what_was_measured_before_is_dropped_and_its_events_are_used_again() -> None:
    device = Device()
    clock = DeviceClock(device.event)
    spend(clock, device, 100)
    clock.drop()  # the warm-up, still under way
    spend(clock, device, 3)
    let_pass(clock)
    assert clock.take() == {"forward": 3}
    assert device.made == 2


def test_a_phase_that_was_left_while_the_clock_stood_still_does_not_go_on() -> None:
    device = Device()
    clock = DeviceClock(device.event)
    clock.enter("optimizer")
    device.now_ms += 2
    clock.start_step()
    device.now_ms += 50
    spend(clock, device, 3)
    let_pass(clock)
    assert clock.take() == {"optimizer": 2, "forward": 3}


MS = 1_000_000


@pytest.mark.parametrize(
    ("host", "device", "expected"),
    [
        # The host only queues: the device works all the time.
        ({"forward": 2, "backward": 2, "other": 16}, {"forward": 8, "backward": 12}, {"forward": 8, "backward": 12}),
        # The device waits for the loader.
        ({"data": 15, "forward": 5}, {"forward": 4}, {"data": 15, "forward": 4, "other": 1}),
        # The loader is slow, but the device has enough in its queue.
        ({"data": 15, "forward": 5}, {"forward": 18}, {"data": 2, "forward": 18}),
        # The host can't keep up.
        ({"forward": 10, "backward": 10}, {"forward": 3, "backward": 5}, {"forward": 3, "backward": 5, "other": 12}),
    ],
)
def test_idle_time_of_the_device_is_the_loaders_first_and_then_the_hosts(
    host: dict[str, int], device: dict[str, float], expected: dict[str, int]
) -> None:
    host_ns = {name: host.get(name, 0) * MS for name in PHASES}
    phases = on_device(host_ns, device)
    assert phases == {name: expected.get(name, 0) * MS for name in PHASES}
    assert sum(phases.values()) == sum(host_ns.values())


def test_work_that_passed_late_never_exceeds_the_wall_time() -> None:
    host_ns = dict.fromkeys(PHASES, 2 * MS)
    phases = on_device(host_ns, {"forward": 30, "backward": 30})
    assert sum(phases.values()) == len(PHASES) * 2 * MS
    assert phases["forward"] == phases["backward"] == len(PHASES) * MS


@pytest.mark.gpu
def test_cuda_events_measure_a_matrix_product() -> None:
    clock = DeviceClock()
    x = torch.randn(4096, 4096, device="cuda")
    for _ in range(10):
        clock.enter("forward")
        x = (x @ x).clamp(-1, 1)
        clock.leave()
    torch.cuda.synchronize()
    assert clock.take()["forward"] > 1
