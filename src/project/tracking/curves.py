"""The curves of the training itself: loss, learning rate, gradient norm, and how many samples a second."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from project.tracking.between_steps import BetweenSteps

MOST_LOSSES = 100  # that wait on the device to be summed up


class TrainingCurves(Callback, BetweenSteps):
    """Logs ``train/loss``, ``train/lr`` and ``train/grad_norm`` every ``trainer.log_every_n_steps`` steps.

    The loss is the mean over the samples of all ranks and all steps since the last point, gathered once per
    point: between two points nothing is copied from the device and no rank waits for another.
    """

    NAMES = ("train/loss", "train/lr", "train/grad_norm")

    def __init__(self) -> None:
        self.samples = 0
        self.train_s = 0.0
        self.first_step_at: float | None = None  # seconds since 1970
        # Since the last point: of the losses of all samples, and how many those are, (2,); and what is not in it yet.
        self._sums: Tensor | None = None
        self._losses: list[Tensor] = []
        self._weights: list[tuple[int, int]] = []
        self._grad_norm: Tensor | None = None
        self._lr: float | None = None
        self._running_since: float | None = None

    @property
    def samples_per_s(self) -> float | None:
        """Samples of all ranks per second of training, validation and checkpoints left out."""
        return self.samples / self.train_s if self.samples else None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._sums, self._losses, self._weights = None, [], []
        sampling = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
        self._num_replicas: int = sampling.get("num_replicas", 1)

    def rank_state(self) -> dict[str, Any]:
        """What this rank has summed up since the last point, for a checkpoint."""
        self._sum_up()
        return {"sums": None if self._sums is None else self._sums.cpu().clone()}

    def load_rank_state(self, state: dict[str, Any]) -> None:
        """Go on with what ``rank_state`` returned."""
        self._sums = state["sums"]

    # The clock runs from the start of an epoch to its last batch, and stands still in validation
    # and while checkpoints are written.
    def on_train_epoch_start(self, *_: Any) -> None:
        self._start_clock()

    def on_train_epoch_end(self, *_: Any) -> None:
        self._stop_clock()

    def on_validation_due(self, *_: Any) -> None:
        self._stop_clock()  # before its loaders' workers start

    def on_validation_start(self, *_: Any) -> None:
        self._stop_clock()

    def on_save_checkpoint(self, *_: Any) -> None:
        self._stop_clock()

    # Not at the end of validation: checkpoint callbacks come last, and save then.
    def on_train_batch_start(self, *_: Any) -> None:
        self._start_clock()

    def _start_clock(self) -> None:
        if self._running_since is None:
            self._running_since = time.perf_counter()

    def _stop_clock(self) -> None:
        if self._running_since is not None:
            self.train_s += time.perf_counter() - self._running_since
            self._running_since = None

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        # Here gradients are complete, synchronised and unscaled, and not clipped yet.
        if _is_logged(trainer):
            self._grad_norm = gradient_norm(trainer, optimizer)
            # Later it is the next step's. Without an optimizer of the model's Lightning steps one with no parameters.
            self._lr = next((group["lr"] for group in optimizer.param_groups), None)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.first_step_at = self.first_step_at or time.time()
        length = batch_length(batch)
        self.samples += length * self._num_replicas
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor):
            self._losses.append(loss.detach())
            # Lightning hands the loss over divided by the number of batches that it accumulates.
            self._weights.append((length * trainer.accumulate_grad_batches, length))
            if len(self._losses) == MOST_LOSSES:
                self._sum_up()

        if _is_logged(trainer):
            accumulating = pl_module.automatic_optimization and trainer.fit_loop._should_accumulate()
            if not accumulating:
                self._log(trainer)

    def _sum_up(self) -> None:
        if not self._losses:
            return
        device = self._losses[0].device
        # Sums in float32 would depend in their seventh digit on how the samples were shared out.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        if device.type == "cpu":  # where operations on ten numbers take longer than reading them
            total = sum(loss.item() * weight for loss, (weight, _) in zip(self._losses, self._weights, strict=True))
            sums = torch.tensor([total, sum(number for _, number in self._weights)], dtype=dtype)
        else:
            weights = torch.tensor(self._weights, dtype=dtype, device=device)
            sums = torch.stack([torch.stack(self._losses).flatten().to(dtype) @ weights[:, 0], weights[:, 1].sum()])
        self._sums = sums if self._sums is None else self._sums.to(sums).add_(sums)
        self._losses, self._weights = [], []

    def _log(self, trainer: L.Trainer) -> None:
        values: dict[str, Tensor] = {}
        self._sum_up()
        if self._sums is not None:
            if trainer.world_size > 1:
                # At once; torchmetrics gathers one state after another, which took 20 ms on two busy cores.
                dist.all_reduce(self._sums)
            values["train/loss"] = self._sums[0] / self._sums[1]
            trainer.progress_bar_metrics["train/loss"] = float(values["train/loss"])
            self._sums = None
        if self._grad_norm is not None:
            values["train/grad_norm"] = self._grad_norm
        if self._lr is not None:
            values["train/lr"] = torch.tensor(self._lr)
        # Not by self.log: of each value that it was given, Lightning makes new dictionaries in every step.
        trainer.callback_metrics.update(values)
        trainer._logger_connector.log_metrics(values)


def gradient_norm(trainer: L.Trainer, optimizer: torch.optim.Optimizer) -> Tensor | None:
    """The norm of all gradients, (); for all ranks to call. None where there are none."""
    over_ranks = getattr(trainer.strategy, "gradient_norm", None)
    if over_ranks is not None:
        norm: Tensor = over_ranks(optimizer)
        return norm
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    total = get_total_norm(gradients) if gradients else None
    return total.full_tensor() if isinstance(total, DTensor) else total


def _is_logged(trainer: L.Trainer) -> bool:
    """Whether Lightning writes what is logged in this step; ``global_step`` counts every optimizer of a GAN."""
    interval: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by a connector of the Trainer
    return (trainer.fit_loop.epoch_loop._batches_that_stepped + 1) % interval == 0


def batch_length(batch: Any) -> int:
    """Samples in a batch: the first dimension of the first tensor in it, 1 where there is none."""
    tensor = _first_tensor(batch)
    return 1 if tensor is None or not tensor.ndim else tensor.shape[0]


def _first_tensor(batch: Any) -> Tensor | None:
    if isinstance(batch, Tensor):
        return batch
    parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else ()
    for part in parts:
        found = _first_tensor(part)
        if found is not None:
            return found
    return None
