"""A net, a model around it, batches and a trainer, small enough to train many times in one process."""

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

CLASSES = 3
CLASS_WEIGHTS = torch.tensor([1.0, 7.0, 0.2], dtype=torch.float64)


def mlp(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 16), nn.Linear(16, CLASSES)
    )


def batches(sizes: list[int], seed: int = 0, dtype: torch.dtype = torch.float64) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "x": torch.randn(size, 6, generator=generator, dtype=dtype),
            "label": torch.randint(CLASSES, (size,), generator=generator),
        }
        for size in sizes
    ]


def loader(sizes: list[int], seed: int = 0, dtype: torch.dtype = torch.float64) -> DataLoader[Any]:
    return DataLoader(batches(sizes, seed, dtype), batch_size=None)  # type: ignore[arg-type]


UNEVEN = [7, 16, 5, 1, 33, 12, 3, 17, 16, 2, 9, 31, 4, 15, 6, 20, 11, 13, 8, 19]  # 20 steps
VALIDATION = [16, 16, 16, 13]  # 61 samples, which nothing divides


class Classifier(L.LightningModule):
    """A net, a loss weighted by class and metrics in float64."""

    def __init__(self, net: nn.Module | None = None, optimizer: str = "SGD") -> None:
        super().__init__()
        self.net = net or mlp()
        self.optimizer = optimizer
        self.loss = MeanMetric().set_dtype(torch.float64)
        self.accuracy = MulticlassAccuracy(CLASSES)
        self.f1 = MulticlassF1Score(CLASSES).set_dtype(torch.float64)
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.net(batch["x"])
        loss = cross_entropy(logits, batch["label"], CLASS_WEIGHTS.to(logits))
        self.losses.append(loss.item())
        self.log("train/loss", loss, batch_size=len(logits))
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        logits = self.net(batch["x"])
        self.loss.update(cross_entropy(logits, batch["label"], reduction="none"))
        self.accuracy.update(logits, batch["label"])
        self.f1.update(logits, batch["label"])
        self.log_dict({"val/loss": self.loss, "val/accuracy": self.accuracy, "val/f1": self.f1})

    test_step = validation_step

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits: Tensor = self.net(batch["x"])
        return logits

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "SGD":
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def quiet_trainer(devices: int, strategy: Any, **arguments: Any) -> L.Trainer:
    """In float64 on the CPU, if nothing else is said; without logs, checkpoints and bars."""
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "max_epochs": 1,
        "precision": "64-true",
        "accelerator": "cpu",
    }
    return L.Trainer(devices=devices, strategy=strategy, **quiet | arguments)


def largest_difference(left: nn.Module, right: nn.Module) -> float:
    pairs = zip(left.parameters(), right.parameters(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)
