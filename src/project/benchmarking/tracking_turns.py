"""The tracker on and off by turns of a few steps within one training, where all else is the same.

Two trainings that do the same differ by a tenth on a machine with other guests, also in one process, and one that
changes every few steps what it does has the machine at the same speed for both.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from project.benchmarking.measure import Measured
from project.benchmarking.task import StepClock
from project.tracking.tracker import Tracker

TURN = 10  # steps


class TrackingTurns(Callback):
    """Switches the tracker, and writes on rank 0 when each step ended; what the switch costs falls on either side.

    Args:
        report: The file to write.
        steps: Training steps to note.
    """

    def __init__(self, report: str, steps: int) -> None:
        self.clock = StepClock(report, steps)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        (self.tracker,) = (callback for callback in trainer.callbacks if isinstance(callback, Tracker))  # type: ignore[attr-defined]

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        next_step = len(self.clock.ends_s) + 1
        is_last = next_step == self.clock.steps  # whose end the tracker sees
        if next_step % TURN == 0 or is_last:
            self.tracker.switch(trainer, is_tracked(next_step) or is_last)
        if self.clock.tick(trainer.current_epoch) and trainer.is_global_zero:
            self.clock.write(float(outputs["loss"]))


def is_tracked(step: int) -> bool:
    """Whether the tracker is on in a step, counted from 0."""
    return step // TURN % 2 == 0


def seconds_per_step(tracked: bool, warmup_steps: int) -> Callable[[Measured], float]:
    """Mean time of the steps with the tracker, or of those without it, after the first ones."""

    def seconds(measured: Measured) -> float:
        ends_s = measured.report["ends_s"]
        steps = (step for step in range(max(1, warmup_steps), len(ends_s)) if is_tracked(step) is tracked)
        return statistics.fmean(ends_s[step] - ends_s[step - 1] for step in steps)

    return seconds
