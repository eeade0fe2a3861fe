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

from project.batch import num_samples
from project.tracking.between_steps import BetweenSteps


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
        # Of the losses of all samples since the last point, (), on an accelerator where they are, and of how many.
        self._total: Tensor | float | None = None
        self._count = 0
        self._grad_norm: Tensor | None = None
        self._lr: float | None = None
        self._running_since: float | None = None

    @property
    def samples_per_s(self) -> float | None:
        """Samples of all ranks per second of training, validation and checkpoints left out."""
        return self.samples / self.train_s if self.samples else None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._total, self._count = None, 0
        sampling = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
        self._num_replicas: int = sampling.get("num_replicas", 1)

    def rank_state(self) -> dict[str, Any]:
        """What this rank has summed up since the last point, for a checkpoint."""
        if self._total is None:
            return {"sums": None}
        return {"sums": torch.tensor([float(self._total), self._count], dtype=torch.float64)}

    def load_rank_state(self, state: dict[str, Any]) -> None:
        """Go on with what ``rank_state`` returned."""
        if state["sums"] is not None:
            total, count = state["sums"].tolist()
            self._total, self._count = total, int(count)

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
        length = num_samples(batch)
        self.samples += length * self._num_replicas
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor):
            # Lightning hands the loss over divided by the number of batches that it accumulates.
            self._add(loss.detach(), length * trainer.accumulate_grad_batches)
            self._count += length
        if _is_logged(trainer):
            accumulating = pl_module.automatic_optimization and trainer.fit_loop._should_accumulate()
            if not accumulating:
                self._log(trainer)

    def _add(self, loss: Tensor, weight: int) -> None:
        if loss.device.type == "cpu" and not isinstance(self._total, Tensor):
            # An operation takes longer than reading the number.
            self._total = (self._total or 0.0) + loss.item() * weight
            return
        # Sums in float32 would depend in their seventh digit on how the samples were shared out.
        dtype = torch.float32 if loss.device.type == "mps" else torch.float64
        if not isinstance(self._total, Tensor):
            self._total = torch.full((), self._total or 0.0, dtype=dtype, device=loss.device)
        self._total.add_(loss.reshape(()), alpha=weight)

    def _log(self, trainer: L.Trainer) -> None:
        values: dict[str, Tensor] = {}
        if self._total is not None:
            values["train/loss"] = self._mean_loss(self._total, trainer.world_size)
            self._total, self._count = None, 0
        if self._grad_norm is not None:
            values["train/grad_norm"] = self._grad_norm
        values = read_at_once(values)
        if "train/loss" in values:
            trainer.progress_bar_metrics["train/loss"] = values["train/loss"].item()
        if self._lr is not None:
            values["train/lr"] = torch.tensor(self._lr)
        # Not by self.log: of each value that it was given, Lightning makes new dictionaries in every step.
        trainer.callback_metrics.update(values)
        trainer._logger_connector.log_metrics(values)

    def _mean_loss(self, total: Tensor | float, world_size: int) -> Tensor:
        """Over the samples of all ranks since the last point, (), where the total is."""
        if isinstance(total, Tensor):
            sums = torch.stack([total, torch.full_like(total, self._count)])
        else:
            sums = torch.tensor([total, self._count], dtype=torch.float64)
        if world_size > 1:
            # At once; torchmetrics gathers one state after another, which took 20 ms on two busy cores.
            dist.all_reduce(sums)
        return sums[0] / sums[1]


def read_at_once(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Scalars in the host's memory, after one wait for the device: a logger, which wants numbers, would for each."""
    if all(value.device.type == "cpu" for value in values.values()):
        return values
    device = next(iter(values.values())).device
    return dict(zip(values, torch.stack([value.to(device) for value in values.values()]).cpu(), strict=True))


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
