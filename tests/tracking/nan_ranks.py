"""What the ranks run in test_nan_watch.py; they import it by its name."""

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from project.launch.quiet import quiet_libraries
from project.launch.rank import cluster_environment
from project.launch.run import Outcome, Run
from project.tracking.nan_watch import NanWatch

BATCHES = 10


class Spoilt(L.LightningModule):
    """Something is not finite in one batch."""

    def __init__(self, batch: int | None, what: str = "loss", last: int | None = None) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        self.spoilt = range(0) if batch is None else range(batch, (batch if last is None else last) + 1)
        self.what = what

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch).square().mean()
        if batch_idx + 1 in self.spoilt:
            if self.what == "loss":
                return loss * float("nan")
            self.net[1].weight.register_hook(self._spoil_once)
        return loss

    def _spoil_once(self, gradient: Tensor) -> Tensor:
        count = self.trainer.fit_loop.epoch_loop.batch_progress.total.ready
        return gradient * float("inf") if count in self.spoilt else gradient

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)


def fit(module: L.LightningModule, watch: NanWatch, **arguments: Any) -> L.Trainer:
    data: Any = DataLoader(torch.ones(4 * BATCHES, 2), batch_size=4)  # type: ignore[arg-type]
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=1, callbacks=[watch], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False, **arguments,
    )  # fmt: skip
    trainer.fit(module, data)
    return trainer


def train(config: dict[str, Any], run: Run) -> Outcome:
    quiet_libraries()
    module = Spoilt(4 if run.rank == config["rank"] else None)
    fit(module, NanWatch(), devices=run.world_size, strategy="ddp", plugins=cluster_environment())
    return Outcome({})
