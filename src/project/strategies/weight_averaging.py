"""An exponential moving average of the weights, the same under every strategy."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_map_only

from project.errors import UserError
from project.strategies.sharded_checkpoint import TRAINING_WEIGHTS


class WeightAveraging(Callback):
    """Validates, saves and tests the average of the weights over the steps; training goes on with its own weights.

    Averaged are parameters and floating-point buffers, such as batch norm's statistics. Each rank averages what it
    holds, so that sharded weights stay sharded. A checkpoint's ``state_dict`` is the average, so that evaluation
    needs to know nothing of it; the weights to go on with lie beside it. Half-precision weights are averaged in
    float32, where the small steps of an average are not rounded away.

    Args:
        decay: Weight of the old average in each step. Early, where the average would keep to the initial weights, it
            is (1 + n) / (10 + n) after n steps, if that is less.
        start_step: Optimizer steps before the average begins.

    Raises:
        UserError: an argument can't be, or a checkpoint callback saves the weights only.
    """

    def __init__(self, decay: float = 0.999, start_step: int = 0) -> None:
        if not 0 <= decay < 1:
            raise UserError(f"decay={decay} of the weights' average can't be: type callbacks.ema.decay=0.999")
        if start_step < 0:
            raise UserError(
                f"start_step={start_step} of the weights' average can't be: type callbacks.ema.start_step=0"
            )
        self.decay = decay
        self.start_step = start_step
        self._updates = 0
        self._steps_seen = 0
        self._averages: list[Tensor] | None = None
        self._set_aside: list[Tensor] | None = None  # the training weights, while the model holds the averages

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        for callback in trainer.checkpoint_callbacks if stage == "fit" else ():
            if isinstance(callback, ModelCheckpoint) and callback.save_weights_only:
                raise UserError(
                    "callbacks=ema keeps the training weights beside their average in each checkpoint, and a "
                    "checkpoint callback saves weights only: leave out save_weights_only=true, or type "
                    "callbacks=default"
                )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._hide(pl_module)  # of an earlier fit
        if self._averages is None:
            self._averages = [_widened(tensor) for tensor in _tensors(pl_module)]
        else:  # read from a checkpoint, perhaps before the model was on its device
            self._averages = [a.to(t.device) for a, t in zip(self._averages, _tensors(pl_module), strict=True)]
        self._steps_seen = trainer.global_step

    @torch.no_grad()
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._steps_seen:
            return  # the batch was accumulated
        self._steps_seen = trainer.global_step
        assert self._averages is not None
        if trainer.global_step <= self.start_step:
            decay = 0.0
        else:
            decay = min(self.decay, (1 + self._updates) / (10 + self._updates))
            self._updates += 1
        for average, tensor in zip(self._averages, _tensors(pl_module), strict=True):
            average.lerp_(tensor.detach().to(average.dtype), 1 - decay)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._show(pl_module)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self._hide(pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._show(pl_module)

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self._updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._updates = state_dict["updates"]

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._averages is None:
            return
        # The strategy says how weights are saved; what it says may be views of the model's own.
        shown = self._set_aside is not None
        states = {shown: _copied(checkpoint["state_dict"])}
        (self._hide if shown else self._show)(pl_module)
        states[not shown] = _copied(trainer.strategy.lightning_module_state_dict())
        (self._show if shown else self._hide)(pl_module)
        checkpoint["state_dict"], checkpoint[TRAINING_WEIGHTS] = states[True], states[False]

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        # The model has the averages now, placed as the strategy places weights.
        if trainer.state.fn == TrainerFn.FITTING and TRAINING_WEIGHTS in checkpoint:
            self._averages = [_widened(tensor) for tensor in _tensors(pl_module)]
            trainer.strategy.load_model_state_dict({"state_dict": checkpoint[TRAINING_WEIGHTS]})

    @torch.no_grad()
    def _show(self, module: L.LightningModule) -> None:
        """Put the averages into the model; the training weights wait."""
        if self._averages is not None and self._set_aside is None:
            self._set_aside = [tensor.detach().clone() for tensor in _tensors(module)]
            for tensor, average in zip(_tensors(module), self._averages, strict=True):
                tensor.copy_(average)

    @torch.no_grad()
    def _hide(self, module: L.LightningModule) -> None:
        """Put the training weights back."""
        if self._set_aside is not None:
            for tensor, own in zip(_tensors(module), self._set_aside, strict=True):
                tensor.copy_(own)
            self._set_aside = None


def _tensors(module: L.LightningModule) -> Iterator[Tensor]:
    """What is averaged. Metrics keep their counts elsewhere."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()  # after an evaluation, some are still gathered: copies of the parameters
    return (tensor for tensor in chain(module.parameters(), module.buffers()) if tensor.is_floating_point())


def _widened(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32), copy=True)


def _copied(state: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), state)
