"""What a model and its data can be asked for: a test, predictions."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden

from project.errors import UserError

STEPS = ("training_step", "validation_step", "test_step")


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


@contextmanager
def batch_noted(model: L.LightningModule, config: dict[str, Any]) -> Iterator[None]:
    """Add to an error of the first step what its batch was, where the model is the user's own and the data are not.

    Or the other way round: who forgot one of the two would look for the mistake in the model.
    """
    try:
        yield
    except Exception as error:
        of_project = {key: _is_of_project(config[key]["_target_"]) for key in ("model", "data")}
        found = _failed_step(model, error)
        if found is not None and of_project["model"] != of_project["data"] and not model.global_step:
            step, batch = found
            kind = type(batch).__name__ + (f" with {', '.join(map(str, batch))}" if isinstance(batch, dict) else "")
            other = "data" if of_project["data"] else "model"
            error.add_note(
                f"{step} got a batch of data._target_={config['data']['_target_']}, a {kind}: if it is not made "
                f"for that, type {other}._target_=MODULE.CLASS with what goes with it"
            )
        raise


def _is_of_project(target: str) -> bool:
    """Whether a ``_target_`` is one of this package."""
    return target.startswith(f"{__name__.partition('.')[0]}.")


def _failed_step(model: L.LightningModule, error: BaseException) -> tuple[str, object] | None:
    """The name and the batch of the model's step that failed; None where another thing did."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if code.co_name in STEPS and frame.f_locals.get("self") is model and code.co_argcount > 1:
            return code.co_name, frame.f_locals[code.co_varnames[1]]
    return None


def _batch_of_forward(error: BaseException) -> object:
    """The batch that Lightning's own predict_step gave to a ``forward`` that failed; None where another thing did."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code is L.LightningModule.predict_step.__code__:
            return frame.f_locals["batch"]
    return None
