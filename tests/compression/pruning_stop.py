"""A callback for test_pruning.py that asks its run to stop, as a signal would."""

import os
import signal
from typing import Any

import lightning as L


class Stop(L.Callback):
    def __init__(self, after: int) -> None:
        self.after = after

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.after:
            os.kill(os.getpid(), signal.SIGTERM)
