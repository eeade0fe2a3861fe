"""What ranks have to tell of a window of steps: a row of numbers each. Pure: knows no Lightning."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields

import torch
from torch import Tensor

from project.tracking.phases import PHASES

NAN = math.nan  # not known


@dataclass(frozen=True, kw_only=True)
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
        tokens: That this rank computed, where the model says how many.
        memory_bytes: Resident memory of the process, without its workers; the peak is since its start.
        device_bytes: What is allocated on the device; the peak is since its start.
        cpu: Cores' worth of CPU time of the process per second.
        gpu_percent: Share of the time in which the GPU worked.
    """

    steps: float
    samples: float
    wall_s: float
    data: float = 0.0
    transfer: float = 0.0
    buffers: float = 0.0
    shards: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    optimizer: float = 0.0
    other: float = 0.0
    sync: float = NAN
    overlap: float = NAN
    step_p50: float = NAN
    step_p95: float = NAN
    step_p99: float = NAN
    step_max: float = NAN
    late: float = NAN
    tokens: float = NAN
    memory_bytes: float = NAN
    memory_peak_bytes: float = NAN
    device_bytes: float = NAN
    device_peak_bytes: float = NAN
    cpu: float = NAN
    gpu_percent: float = NAN
    gpu_celsius: float = NAN
    gpu_watts: float = NAN

    def packed(self) -> tuple[float, ...]:
        """All fields in their order, for one row of a tensor."""
        return astuple(self)


FIELDS = tuple(field.name for field in fields(Window))
NUM_FIELDS = len(FIELDS)
SUMS = ("steps", "samples", "wall_s", "tokens")
MAXIMA = ("step_max", "memory_peak_bytes", "device_peak_bytes")
LAST = ("memory_bytes", "device_bytes")


class Ranks:
    """A window of all ranks.

    Args:
        rows: A `Window` each, packed, in the order of the ranks; (R, NUM_FIELDS) float64. It is kept.
    """

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    @classmethod
    def of(cls, windows: Sequence[Window]) -> Ranks:
        rows = [window.packed() for window in windows]
        return cls(torch.tensor(rows, dtype=torch.float64).reshape(len(rows), NUM_FIELDS))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, name: str) -> Tensor:
        """One field of all ranks, (R,); a view."""
        return self.rows[:, FIELDS.index(name)]

    def with_columns(self, columns: Mapping[str, Tensor]) -> Ranks:
        """The same with other values of some fields, (R,) each."""
        rows = self.rows.clone()
        for name, values in columns.items():
            rows[:, FIELDS.index(name)] = values
        return Ranks(rows)

    def of_rank(self, rank: int) -> Window:
        return Window(**dict(zip(FIELDS, self.rows[rank].tolist(), strict=True)))

    def parts(self) -> dict[str, Tensor]:
        """The phases, with what is known of backward's waiting as one of its own, (R,) each; they sum to the step.

        Without those of `buffers` and `shards` where no rank has any.
        """
        parts = {name: self[name] for name in PHASES}
        for name in ("buffers", "shards"):
            if not (parts[name] > 0).any():
                del parts[name]
        if not self["sync"].isnan().all():
            parts["sync"] = torch.minimum(self["sync"].nan_to_num(0.0), parts["backward"])
            parts["backward"] = parts["backward"] - parts["sync"]
        return parts

    def step(self) -> Tensor:
        """Mean wall time of a step, in milliseconds, (R,): the sum of its phases."""
        return self.rows[:, _PHASES].sum(dim=1)

    def waits(self) -> Tensor:
        """How long each rank waits for later ones in a step, in milliseconds, (R,).

        What all spend in communication is its transfer, the rest is waiting; where that is not known, as under FSDP,
        the latest rank is waited for by the others.
        """
        parts = self.parts()
        shared = [parts[name] for name in ("sync", "buffers") if name in parts]
        stepped = self["steps"] > 0
        if not stepped.any():
            return torch.zeros(len(self), dtype=torch.float64)
        if shared:
            return torch.stack([(part - part[stepped].min()).clamp(min=0) for part in shared]).sum(dim=0)
        late = self["late"].nan_to_num(0.0)
        return late.max() - late

    def busy(self) -> Tensor:
        """The rest of a step, (R,)."""
        return self.step() - self.waits()

    def merged(self, later: Ranks) -> Ranks:
        """This window and a later one as one: means weighted by steps, the longest step of both, the last memory."""
        mine, steps = self["steps"][:, None], later["steps"][:, None]
        share = torch.where(mine + steps > 0, steps / (mine + steps).clamp(min=1), 0.0)
        rows = self.rows + share * (later.rows - self.rows)
        rows = torch.where(self.rows.isnan(), later.rows, torch.where(later.rows.isnan(), self.rows, rows))
        # A rank without steps has no times.
        rows = torch.where(mine == 0, later.rows, torch.where(steps == 0, self.rows, rows))
        result = Ranks(rows)
        for name in SUMS:
            result[name].copy_(_nan_plus(self[name], later[name]))
        for name in MAXIMA:
            result[name].copy_(torch.fmax(self[name], later[name]))
        for name in LAST:
            result[name].copy_(later[name])
        return result


_PHASES = [FIELDS.index(name) for name in PHASES]


def _nan_plus(mine: Tensor, more: Tensor) -> Tensor:
    both_unknown = mine.isnan() & more.isnan()
    return torch.where(both_unknown, NAN, mine.nan_to_num(0.0) + more.nan_to_num(0.0))


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
