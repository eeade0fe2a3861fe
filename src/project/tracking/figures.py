"""Pictures of all ranks: a stacked bar each, and who was busy when."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import torch
from tensorboard.compat.proto.summary_pb2 import Summary
from torch import Tensor

from project.tracking.windows import Ranks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INCHES, DPI = (9.0, 4.5), 80
MOST_BARS = 64


class BusyHistory:
    """How long each rank was busy in a step, over the whole training, in a bounded number of columns.

    Once they are full, each two neighbours become one, and from then on twice as many windows share a column.

    Args:
        columns: At most; even.
    """

    def __init__(self, columns: int = 256) -> None:
        self._most = columns
        self._columns: list[tuple[int, Tensor]] = []  # the step at its end, and milliseconds, (R,)
        self._windows_a_column = 1
        self._open: list[Tensor] = []

    def add(self, step: int, busy_ms: Tensor) -> None:
        self._open.append(busy_ms)
        if len(self._open) < self._windows_a_column:
            return
        self._columns.append((step, torch.stack(self._open).mean(dim=0)))
        self._open = []
        if len(self._columns) == self._most:
            pairs = zip(self._columns[::2], self._columns[1::2], strict=True)
            self._columns = [(later, (a + b) / 2) for (_, a), (later, b) in pairs]
            self._windows_a_column *= 2

    def steps(self) -> list[int]:
        """Until which each column reaches."""
        return [step for step, _ in self._columns]

    def busy_ms(self) -> Tensor:
        """(R, columns)."""
        return torch.stack([column for _, column in self._columns], dim=1)


def bars(ranks: Ranks) -> Figure:
    """A stacked bar a rank: the parts of its mean step; areas instead where bars would be too many to tell apart."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=INCHES, dpi=DPI, layout="constrained")
    axes = figure.subplots()
    numbers = range(len(ranks))
    parts = {name: part.numpy() for name, part in ranks.parts().items()}
    if len(ranks) > MOST_BARS:
        axes.stackplot(numbers, *parts.values(), labels=list(parts))
    else:
        base = torch.zeros(len(ranks), dtype=torch.float64).numpy()
        for name, part in parts.items():
            axes.bar(numbers, part, bottom=base, label=name)
            base = base + part
    axes.set(ylabel="ms of a step", xlabel="rank", title="Where the steps of each rank go")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=8, frameon=False)
    return figure


def heat_map(history: BusyHistory) -> Figure:
    """Ranks by time: how long each was busy in a step, waiting for others left out."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=INCHES, dpi=DPI, layout="constrained")
    axes = figure.subplots()
    busy, steps = history.busy_ms(), history.steps()
    image = axes.imshow(busy.numpy(), aspect="auto", interpolation="nearest")
    shown = sorted({round(number * (len(steps) - 1) / 8) for number in range(9)})
    axes.set_xticks(shown, [f"{steps[column]:,}" for column in shown])
    axes.set(xlabel="step", ylabel="rank", title="Busy time of a step (ms), without waiting for other ranks")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(image, ax=axes)
    return figure


def as_value(tag: str, figure: Figure) -> Summary.Value:
    """An image of TensorBoard's."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    width, height = (round(inches * DPI) for inches in INCHES)
    image = Summary.Image(encoded_image_string=buffer.getvalue(), width=width, height=height, colorspace=4)
    return Summary.Value(tag=tag, image=image)
