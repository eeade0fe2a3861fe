"""What a model and its data can be asked for: a test, predictions."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden

from project.errors import UserError

STEPS = ("training_step", "validation_step", "test_step", "predict_step")
# What a step raises that was written for another kind of batch, or for other shapes.
OF_BATCHES = (TypeError, KeyError, IndexError, ValueError, RuntimeError)


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
    """Add to an error of the first step what its batch was, where the model or its net is the user's own, or the data.

    A model that was made for batches of another kind or shape fails in a line that looks right.
    """
    try:
        yield
    except Exception as error:
        found = _failed_step(model, error)
        label = re.fullmatch(r"Target (\d+) is out of bounds\.?", str(error))
        if found is not None and label is not None:
            error.add_note(
                f"{found[0]} got the label {label[1]}, and the net gives no more than {label[1]} outputs, for labels "
                f"from 0: let it give at least {int(label[1]) + 1}, one for each class"
            )
        elif found is not None and _may_be_of_batch(error) and not model.global_step:
            own = {key for key in ("model", "model.net", "data") if _is_own(config, key)}
            if own:
                error.add_note(_about_batch(*found, config["data"]["_target_"], own))
        raise


def _may_be_of_batch(error: Exception) -> bool:
    if isinstance(error, AttributeError):  # of the model itself it is another mistake
        return re.match(r"'(list|tuple|dict|str|Tensor)' object", str(error)) is not None
    return isinstance(error, OF_BATCHES)


def _about_batch(step: str, batch: object, data: str, own: set[str]) -> str:
    """What a step's batch was, and what to do where the step was not made for it."""
    if isinstance(batch, dict):
        told = f"a dict with only {', '.join(f'{name}{_shape(value)}' for name, value in batch.items())}"
        parts = [f'batch["{name}"]' for name in batch]
    elif isinstance(batch, tuple | list):
        told = f"a {type(batch).__name__} of {len(batch)}{''.join(f',{_shape(value)}' for value in batch)}"
        parts = [f"batch[{place}]" for place in range(len(batch))]
    else:
        told, parts = f"a {type(batch).__name__}{_shape(batch)}", ["batch"]
    advice = f"use {', '.join(parts)} and make the net for these shapes"
    if step == "predict_step":
        advice += ", and ask for a label only where there is one"
    elif "data" not in own:
        advice += ", or type data._target_=MODULE.CLASS if the model is for other data"
    elif "model" not in own:
        # Whose batches are described where the model is.
        advice = "give the data what the model's class says of its batches, or type model._target_=MODULE.CLASS"
    return f"{step} got a batch of data._target_={data}, {told}: {advice}"


def _shape(value: object) -> str:
    return f" {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""


def _is_own(config: dict[str, Any], key: str) -> bool:
    """Whether a class was put in at ``model``, ``model.net`` or ``data`` that is none of this package."""
    node: Any = config
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return isinstance(node, dict) and "_target_" in node and not _is_of_project(node["_target_"])


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
