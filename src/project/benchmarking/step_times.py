"""The callback that notes when each step of a Lightning training ended."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from project.benchmarking.task import StepClock


class StepTimes(Callback):
    """Writes the report of a measurement on rank 0; one call and one list entry a step are all that it costs.

    Args:
        report: The file to write.
        steps: Training steps to note, or batches if validation is measured; -1 for all of the training.
        measure: ``train`` or ``validate``.
        warmup_steps: The first ones, that are not measured.
    """

    def __init__(self, report: str, steps: int, measure: str = "train", warmup_steps: int = 0) -> None:
        self.clock = StepClock(report, steps, warmup_steps)
        self.validates = measure == "validate"

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self.validates and self.clock.tick(trainer.current_epoch) and trainer.is_global_zero:
            self.clock.write(float(outputs["loss"]))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.clock.steps == -1 and trainer.is_global_zero:
            self.clock.write()

    def on_validation_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        if self.validates and not trainer.sanity_checking and self.clock.tick(0) and trainer.is_global_zero:
            self.clock.write()
