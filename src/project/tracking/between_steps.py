"""Places between two training steps, where a run can be measured, saved and resumed."""

from __future__ import annotations

import lightning as L


class BetweenSteps:
    """What a callback that derives from this is told besides Lightning's hooks; on all ranks, after the same steps."""

    def on_step_done(self, trainer: L.Trainer) -> None:
        """The optimizer has stepped; what follows the step (a validation, the end of the epoch) has not begun."""

    def on_epoch_done(self, trainer: L.Trainer) -> None:
        """Everything that belongs to the epoch is over, schedulers included; the next has not begun."""

    def on_validation_due(self, trainer: L.Trainer) -> None:
        """A validation within the training is about to begin; its loaders have drawn no random number yet."""
