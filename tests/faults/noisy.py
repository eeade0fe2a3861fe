"""A model and data in which everything is random that a run may draw: what a resumed run must draw again."""

import os
import random
import signal
import time
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from project.data import DataModule


class NoisyPoints:
    """Points in a plane and the side of a line that they lie on, with noise from Python, NumPy and torch.

    ``bad`` is the index of a sample that can't be read: it ``raises``, ``dies`` with its process, or ``hangs``.
    """

    def __init__(self, length: int, seed: int, bad: int | None = None, how: str = "raises") -> None:
        self.points = torch.randn(length, 2, generator=torch.Generator().manual_seed(seed))
        self.bad, self.how = bad, how

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index == self.bad:
            if self.how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "hangs":
                time.sleep(3600)
            raise RuntimeError("this sample is broken")
        noise = 0.1 * (torch.randn(2) + torch.from_numpy(np.random.randn(2)).float() + random.gauss(0, 1))
        point = self.points[index]
        return {"point": point + noise, "side": (point.sum() > 0).float()}


class NoisyData(DataModule):
    def __init__(
        self,
        length: int = 96,
        bad: int | None = None,
        how: str = "raises",
        batch_size: int = 16,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__(batch_size, num_workers, seed=seed)
        self.length, self.bad, self.how = length, bad, how

    def setup(self, stage: str | None = None) -> None:
        self.train_set = NoisyPoints(self.length, 0, self.bad, self.how)
        self.val_set = NoisyPoints(24, 1)
        self.test_set = NoisyPoints(24, 2)


class NoisyModel(L.LightningModule):
    """Dropout and batch norm, a metric and a mean over each training epoch, and a schedule that follows them.

    ``sleep_s`` is the least time of a step. In step ``at`` of a stage, after as many training steps, rank ``who`` does
    ``what``; in the validation after step ``signal_at`` it asks to stop.
    """

    def __init__(
        self,
        sleep_s: float = 0.0,
        at: int = -1,
        who: int = 0,
        what: str = "raise",
        signal_at: int = -1,
        stage: str = "train",
    ) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))
        self.hits = MeanMetric()
        self.sleep_s, self.at, self.who, self.what, self.signal_at = sleep_s, at, who, what, signal_at
        self.stage = stage

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        time.sleep(self.sleep_s)
        self._misbehave("train")
        loss, hits = self._judge(batch)
        self.hits(hits)
        self.log("train/hits", self.hits, on_step=False, on_epoch=True)
        self.log("train/mean_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
        time.sleep(self.sleep_s)
        if self.global_step == self.signal_at and self.global_rank == self.who:
            misbehave("SIGTERM")
        self._misbehave("validate")
        loss, _ = self._judge(batch)
        self.log("val/loss", loss, sync_dist=True)

    def test_step(self, batch: dict[str, Tensor], index: int) -> None:
        self._misbehave("test")
        loss, _ = self._judge(batch)
        self.log("test/loss", loss, sync_dist=True)

    def _misbehave(self, stage: str) -> None:
        if self.stage == stage and self.global_step == self.at and self.global_rank == self.who:
            misbehave(self.what)

    def _judge(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        logits = self.net(batch["point"]).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch["side"])
        return loss, ((logits > 0) == (batch["side"] > 0.5)).float()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val/loss"}}


class PlainSGD(NoisyModel):
    """Its optimizer keeps no state."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def misbehave(what: str) -> None:
    """What a rank may do in the middle of a step."""
    if what == "raise":
        raise RuntimeError("a fault of one rank")
    if what == "memory":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
    if what == "wait":
        time.sleep(3600)
    if what == "once" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "hang_once" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        time.sleep(3600)
    if what.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, what))
