"""Lightning without the template: bare, and in the pattern that the most popular template of its kind spreads.

python -m project.benchmarking.lightning_only bare|popular|popular_pil TASK.json
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torchmetrics import MaxMetric, MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from project.benchmarking import workload
from project.benchmarking.step_times import StepTimes
from project.benchmarking.task import Task


class Bare(L.LightningModule):
    """A net and its loss; nothing is logged. Batch: ``{"image": (B, C, H, W), "label": (B,)}``."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task = task
        self.net = workload.build_net(task.config)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return cross_entropy(self.net(batch["image"]), batch["label"])

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer, schedule = workload.build_optimizer(self.task.config, self.net.parameters(), self.task.steps)
        if schedule is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Popular(Bare):
    """Two metric objects updated and logged in every step, shown in the progress bar. Batch: a dict, or a pair."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        num_classes = task.config["data"]["num_classes"]
        self.train_loss, self.val_loss = MeanMetric(), MeanMetric()
        self.train_acc, self.val_acc = (MulticlassAccuracy(num_classes, average="micro") for _ in range(2))
        self.val_acc_best = MaxMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._step(batch, "train", self.train_loss, self.train_acc)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._step(batch, "val", self.val_loss, self.val_acc)

    def on_validation_epoch_end(self) -> None:
        self.val_acc_best(self.val_acc.compute())
        self.log("val/acc_best", self.val_acc_best.compute(), sync_dist=True, prog_bar=True)

    def _step(self, batch: Any, stage: str, mean_loss: MeanMetric, accuracy: MulticlassAccuracy) -> Tensor:
        image, label = (batch["image"], batch["label"]) if isinstance(batch, dict) else batch
        logits = self.net(image)
        loss = cross_entropy(logits, label)
        mean_loss(loss)
        accuracy(logits.argmax(dim=1), label)
        self.log(f"{stage}/loss", mean_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log(f"{stage}/acc", accuracy, on_step=False, on_epoch=True, prog_bar=True)
        return loss


def bare(task: Task) -> None:
    trainer = _trainer(
        task, [], enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, logger=False
    )
    trainer.fit(Bare(task), workload.train_loader(task.config))


def popular(task: Task) -> None:
    _fit_popular(task, workload.train_loader(task.config), workload.build_data(task.config).val_dataloader())


def popular_pil(task: Task) -> None:
    from project.benchmarking.pil_digits import digits_loaders  # Pillow comes with matplotlib

    train_loader, val_loader = digits_loaders(task.config["data"])
    steps = task.config["trainer"]["max_epochs"] * len(train_loader)
    _fit_popular(replace(task, steps=steps), train_loader, val_loader)


def _fit_popular(task: Task, train_loader: DataLoader[Any], val_loader: DataLoader[Any]) -> None:
    folder = task.config["paths"]["run_dir"]
    checkpoints = ModelCheckpoint(f"{folder}/checkpoints", monitor="val/acc", mode="max", save_last=True)
    trainer = _trainer(task, [checkpoints], default_root_dir=folder, logger=False)
    trainer.fit(Popular(task), train_loader, val_loader)


def _trainer(task: Task, callbacks: list[Any], **arguments: Any) -> L.Trainer:
    return L.Trainer(
        accelerator=task.config["trainer"]["accelerator"],
        devices=1,
        max_epochs=-1,
        max_steps=task.steps,
        limit_val_batches=task.config["trainer"]["limit_val_batches"],
        callbacks=[*callbacks, StepTimes(task.report, task.steps, warmup_steps=task.warmup_steps)],
        **arguments,
    )


if __name__ == "__main__":
    pattern: Callable[[Task], None] = {"bare": bare, "popular": popular, "popular_pil": popular_pil}[sys.argv.pop(1)]
    pattern(Task.from_command_line())
