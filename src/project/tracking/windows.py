"""What a rank has to tell of a window of steps, as one row of numbers. Pure: knows no Lightning."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from itertools import pairwise

from project.tracking.phases import PHASES

NAN = math.nan  # not known


@dataclass(frozen=True)
class Window:
    """Some consecutive training steps of one rank. Times are per step, in milliseconds; NaN is not known.

    Attributes:
        steps: Number of steps.
        samples: That this rank computed.
        wall_s: Sum of the steps.
        data: Waiting for the loader; so for the other phases, see `PHASES`.
        sync: The part of backward in which this rank waited for gradients of others, exposed: not hidden behind its
            own computation.
        overlap: Communication of gradients behind which it computed.
        step_p50: Median of the steps, and so on to the longest.
        late: By how much this rank holds the others up.
        memory_bytes: Resident memory of the process, without its workers.
        device_bytes: Peak of what was allocated on the device.
        cpu: Cores' worth of CPU time of the process per second.
    """

    steps: float
    samples: float
    wall_s: float
    data: float
    transfer: float
    forward: float
    backward: float
    optimizer: float
    other: float
    sync: float = NAN
    overlap: float = NAN
    step_p50: float = NAN
    step_p95: float = NAN
    step_p99: float = NAN
    step_max: float = NAN
    late: float = NAN
    memory_bytes: float = NAN
    device_bytes: float = NAN
    cpu: float = NAN

    @property
    def step(self) -> float:
        """Mean wall time of a step, in milliseconds: the sum of its phases."""
        return sum(self.parts().values())

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.wall_s if self.wall_s else NAN

    def parts(self) -> dict[str, float]:
        """The phases, with what is known of backward's waiting as a phase of its own; they sum to the step."""
        parts = {name: float(getattr(self, name)) for name in PHASES}
        if not math.isnan(self.sync):
            parts["sync"] = min(self.sync, parts["backward"])
            parts["backward"] -= parts["sync"]
        return parts

    def packed(self) -> tuple[float, ...]:
        """All fields in their order, for one tensor."""
        return astuple(self)

    @classmethod
    def unpacked(cls, numbers: Sequence[float]) -> Window:
        return cls(*numbers)


NUM_FIELDS = len(fields(Window))


def merge(windows: Sequence[Window]) -> Window:
    """One window of several of one rank: means weighted by steps, the longest step of all, the last memory."""
    windows = [window for window in windows if window.steps]
    if not windows:
        return Window(*[0.0] * NUM_FIELDS)

    def mean(name: str) -> float:
        known = [(getattr(w, name), w.steps) for w in windows if not math.isnan(getattr(w, name))]
        return sum(value * steps for value, steps in known) / sum(steps for _, steps in known) if known else NAN

    values = {field.name: mean(field.name) for field in fields(Window)}
    for name in ("steps", "samples", "wall_s"):
        values[name] = sum(getattr(window, name) for window in windows)
    values["step_max"] = max(window.step_max for window in windows)
    for name in ("memory_bytes", "device_bytes"):
        values[name] = getattr(windows[-1], name)
    return Window(**values)


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that is not exceeded by ``share`` of all; of sorted values, NaN of none."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else NAN


def summarize_steps(totals_ns: dict[str, int], steps_ns: Sequence[int], samples: float) -> Window:
    """The times of a window, from a `PhaseClock`."""
    number = max(1, len(steps_ns))
    ordered = sorted(step / 1e6 for step in steps_ns)
    return Window(
        steps=len(steps_ns),
        samples=samples,
        wall_s=sum(steps_ns) / 1e9,
        **{name: totals_ns[name] / 1e6 / number for name in PHASES},
        step_p50=percentile(ordered, 0.5),
        step_p95=percentile(ordered, 0.95),
        step_p99=percentile(ordered, 0.99),
        step_max=ordered[-1] if ordered else NAN,
    )


def lateness(arrivals_s: Sequence[Sequence[float]]) -> list[float]:
    """The share of the time by which each rank holds the others up, from the times at which all came to collectives.

    A rank lags by its distance to the median of the others. Where all wait for each other its lag is gone
    afterwards, and where they only leave work behind, as DDP's buckets, it stays for some collectives; so what counts
    is by how much the lag grows from one to the next. Noise makes all lags grow now and then: that of the others is
    taken off.

    Args:
        arrivals_s: For each rank, seconds at which it came to the same collectives, in their order.
    """
    if len(arrivals_s) < 2 or len(arrivals_s[0]) < 2:
        return [NAN] * len(arrivals_s)
    grown = []
    for rank, own in enumerate(arrivals_s):
        others = [times for other, times in enumerate(arrivals_s) if other != rank]
        lags = [
            max(0.0, time - percentile(sorted(of_others), 0.5))
            for time, of_others in zip(own, zip(*others, strict=True), strict=True)
        ]
        grown.append(sum(max(0.0, later - earlier) for earlier, later in pairwise(lags)))
    span_s = max(arrivals_s[0]) - min(arrivals_s[0])
    shares = []
    for rank, own_growth in enumerate(grown):
        usual = percentile(sorted(growth for other, growth in enumerate(grown) if other != rank), 0.5)
        shares.append(max(0.0, own_growth - usual) / span_s if span_s else NAN)
    return shares
