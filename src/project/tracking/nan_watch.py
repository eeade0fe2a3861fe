"""Looks for a loss or gradients that are not finite, and says where they were first."""

from __future__ import annotations

import math
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.optim import Optimizer

from project.errors import UserError
from project.notices import notice
from project.tracking.curves import gradient_norm
from project.tracking.device_clock import cuda_event

CHOICES = ("stop", "skip", "ignore")
MOST_SKIPPED = 20  # steps in a row
READ_EVERY = 10  # steps, on accelerators


class NanWatch(Callback):
    """Acts on the first loss that is NaN or infinite, or the first such gradients.

    ``stop`` and ``ignore`` look at the loss of each step, on each rank before it meets others. On CUDA they never
    wait for the device, and on other accelerators once in ten steps, so that they hear of it some steps later.
    Gradients that were not finite show in the next loss, and in the weights. ``skip`` looks at the norm of the
    gradients of each step, which it waits for.

    Args:
        on_nan: ``stop`` ends the training with an error that names step, rank and parameter; ``skip`` leaves a step of
            the optimizer out; ``ignore`` warns once.

    Raises:
        ValueError: ``on_nan`` is unknown.
    """

    def __init__(self, on_nan: str = "stop") -> None:
        if on_nan not in CHOICES:
            raise ValueError(f"on_nan={on_nan} is unknown: type callbacks.nan.on_nan=stop, skip or ignore")
        self.on_nan = on_nan
        self.skipped = 0  # steps of optimizers

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # In float16 gradients overflow now and then; the scaler leaves such steps out on its own.
        self._has_scaler = getattr(trainer.precision_plugin, "scaler", None) is not None
        self._first = FirstBad(trainer.strategy.root_device, only_nan=self._has_scaler)
        self._has_told = False
        self._skipped_in_a_row = 0

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        if self.on_nan == "skip":
            return
        step = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        self._first.note(step, loss)
        if not self._has_told and (first := self._first.read()) is not None:
            self._tell(trainer, pl_module, first)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.skipped:
            notice(f"on_nan=skip left out {self.skipped} steps of the optimizer")
        elif self.on_nan != "skip" and not self._has_told and (first := self._first.read(wait=True)) is not None:
            self._tell(trainer, pl_module, first)

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        if self.on_nan != "skip" or self._has_scaler:
            return
        # Of all ranks, so they agree.
        norm = gradient_norm(trainer, optimizer)
        if norm is None or bool(norm.isfinite()):
            self._skipped_in_a_row = 0
            return
        self.skipped += 1
        self._skipped_in_a_row += 1
        step = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        where = _name(_first_bad(pl_module, of_gradient=True))
        if self._skipped_in_a_row >= MOST_SKIPPED:
            raise UserError(
                f"the last {MOST_SKIPPED} steps until batch {step} were left out, since their gradients were not "
                f"finite{where}: type optimizer.lr=0.0001, or another smaller rate, or trainer.gradient_clip_val=1"
            )
        if self.skipped == 1:
            notice(f"batch {step}: the gradients are not finite{where}; the step is left out (on_nan=skip)")
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None  # which optimizers leave as it is, moments and weight decay too

    def _tell(self, trainer: L.Trainer, module: L.LightningModule, first: int) -> None:
        self._has_told = True
        bad = _first_bad(module, of_gradient=False)
        cause = f", and so is the weight {bad}, through the gradients of a step before" if bad else ""
        sentence = f"rank {trainer.global_rank}: the loss of batch {first} is not finite{cause}"
        if self.on_nan == "stop":
            raise UserError(
                f"{sentence}: type a smaller optimizer.lr, trainer.gradient_clip_val=1, trainer.detect_anomaly=true to "
                "see where it comes from, or callbacks.nan.on_nan=skip to leave such steps out"
            )
        notice(f"{sentence} (on_nan=ignore)")


class FirstBad:
    """The step of the first loss that is not finite, found on the device, and read seldom or without waiting.

    Args:
        device: Of the losses.
        only_nan: Whether an infinite loss is none: a gradient scaler lets losses overflow, and takes care of it.
    """

    def __init__(self, device: torch.device, only_nan: bool = False) -> None:
        self._on_cpu = device.type == "cpu"
        self._on_cuda = device.type == "cuda"
        self._only_nan = only_nan
        self._step: int | None = None
        self._first = torch.full((), -1, dtype=torch.int64, device=device)
        self._host = torch.full((), -1, dtype=torch.int64, pin_memory=self._on_cuda)
        self._copied: Any = None  # the event after the copy
        self._unread = 0

    def note(self, step: int, loss: Tensor) -> None:
        if not self._on_cpu:
            self._first = torch.where((self._first < 0) & self._are_bad(loss).any(), step, self._first)
        elif self._step is None and self._is_bad(loss):
            self._step = step

    def _are_bad(self, loss: Tensor) -> Tensor:
        return loss.detach().isnan() if self._only_nan else ~loss.detach().isfinite()

    def _is_bad(self, loss: Tensor) -> bool:
        if loss.numel() != 1:
            return bool(self._are_bad(loss).any())
        value = loss.item()  # the operations above took ten times as long
        return math.isnan(value) if self._only_nan else not math.isfinite(value)

    def read(self, wait: bool = False) -> int | None:
        """The step; None as long as none is known."""
        if self._on_cpu:
            return self._step
        if wait:
            return self._number(self._first)
        if self._copied is not None:
            if not self._copied.query():
                return None
            self._copied = None
            return self._number(self._host)
        self._unread += 1
        if self._unread >= READ_EVERY:
            self._unread = 0
            if not self._on_cuda:
                return self._number(self._first)
            self._host.copy_(self._first, non_blocking=True)
            self._copied = cuda_event()
            self._copied.record()
        return None

    @staticmethod
    def _number(first: Tensor) -> int | None:
        number = int(first)
        return None if number < 0 else number


def _first_bad(module: nn.Module, of_gradient: bool) -> str | None:
    """The first parameter of which this rank has something that is not finite."""
    for name, parameter in module.named_parameters():
        tensor = parameter.grad if of_gradient else parameter.detach()
        if tensor is not None:
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            if not bool(local.isfinite().all()):
                return name
    return None


def _name(parameter: str | None) -> str:
    return f", first that of {parameter}" if parameter else ""
