"""The last state is validated, wherever in an epoch the training ends."""

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback


class FinalValidation(Callback):
    """Validates after the last of ``trainer.max_steps`` steps.

    Lightning validates at intervals and at the ends of epochs only: a run of fewer steps than an epoch has would
    never be, and the steps since the last interval could not become the best checkpoint.
    """

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if 0 <= trainer.max_steps <= trainer.global_step:
            trainer.should_stop = True  # which Lightning answers with a validation
