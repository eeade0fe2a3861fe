"""A callback for test_trace_profiler.py, which runs in the ranks."""

from pathlib import Path
from typing import Any

import lightning as L


class Asker(L.Callback):
    """Puts a file into the run folder after some batches, as somebody would at a shell.

    Args:
        at: How many.
        text: Of the file.
    """

    def __init__(self, at: int, text: str) -> None:
        self.at, self.text = at, text

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.at -= 1
        if self.at == 0 and trainer.is_global_zero:
            (Path(trainer.default_root_dir) / "profile").write_text(self.text)
