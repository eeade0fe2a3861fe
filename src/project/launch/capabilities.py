"""What a model and its data can be asked for: a test, predictions."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import lightning as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden

from project.errors import UserError


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


@contextmanager
def forward_explained(model: L.LightningModule) -> Iterator[None]:
    """Say what to define where the batch is no input of ``forward``, which gets it for want of a ``predict_step``.

    Raises:
        UserError: ``forward`` failed on a batch that is a pair, a list or a dict.
    """
    try:
        yield
    except Exception as error:
        batch = _batch_of_forward(error)
        if not isinstance(batch, tuple | list | dict) or isinstance(error, UserError | torch.OutOfMemoryError):
            raise
        name, kind = type(model).__name__, type(batch).__name__
        took = "batch[0]" if not isinstance(batch, dict) else f"batch[{next(iter(batch), 'image')!r}]"
        raise UserError(
            f"{name} has no predict_step, so forward was given the whole batch, a {kind} of {len(batch)}, and failed "
            f"({type(error).__name__}: {str(error).partition(chr(10))[0]}): define def predict_step(self, batch, "
            f"batch_idx): return self({took})"
        ) from error


def _batch_of_forward(error: BaseException) -> object:
    """The batch that Lightning's own predict_step gave to a ``forward`` that failed; None where another thing did."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code is L.LightningModule.predict_step.__code__:
            return frame.f_locals["batch"]
    return None
