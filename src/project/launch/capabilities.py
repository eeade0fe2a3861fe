"""What a model and its data can be asked for: a test, predictions."""

from __future__ import annotations

import lightning as L
from lightning.pytorch.utilities.model_helpers import is_overridden


def untestable(model: L.LightningModule, datamodule: L.LightningDataModule) -> str | None:
    """Why the model can't be tested; None where it can."""
    for owner, hook in ((model, "test_step"), (datamodule, "test_dataloader")):
        if not is_overridden(hook, owner):
            return f"{type(owner).__name__} has no {hook}"
    return None


def unpredicting(model: L.LightningModule) -> str | None:
    """Why the model can't predict; None where it can."""
    if is_overridden("predict_step", model) or is_overridden("forward", model):
        return None
    return f"{type(model).__name__} has neither predict_step nor forward"
