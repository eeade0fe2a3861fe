"""Training that reads several loaders of different lengths side by side."""

from itertools import chain
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from project.data.sharing import share

Batch = dict[str, list[int] | None]


class Several(L.LightningDataModule):
    """Eight batches beside three, of samples that are their own index."""

    def __init__(self, mode: str | None = None, num_workers: int = 0, shuffle: bool = True) -> None:
        super().__init__()
        self.mode = mode
        self.arguments = {"num_workers": num_workers, "shuffle": shuffle}

    def train_dataloader(self) -> Any:
        loaders = {name: self.loader(length) for name, length in (("long", 16), ("short", 6))}
        return loaders if self.mode is None else CombinedLoader(loaders, self.mode)  # type: ignore[arg-type]

    def loader(self, length: int) -> Any:
        return DataLoader(range(length), 2, **self.arguments)  # type: ignore[arg-type]


class Recorder(L.LightningModule):
    def __init__(self, save_at_step: int | None = None, path: Path | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.steps: list[Batch] = []
        self.save_at_step, self.path = save_at_step, path

    def training_step(self, batch: dict[str, Tensor | None], batch_idx: int) -> Tensor:
        self.steps.append({name: None if part is None else part.tolist() for name, part in batch.items()})
        loss: Tensor = self.layer(torch.ones(1, 1)).mean()
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step == self.save_at_step and self.path is not None:
            self.trainer.save_checkpoint(self.path)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit(datamodule: L.LightningDataModule, model: Recorder, ckpt_path: Path | None = None) -> list[Batch]:
    share(datamodule, seed=3)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, datamodule=datamodule, ckpt_path=ckpt_path)
    return model.steps


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_shorter_loader_begins_again_until_the_longer_ends(num_workers: int) -> None:
    steps = fit(Several(num_workers=num_workers), Recorder())
    assert len(steps) == 16
    for epoch in (steps[:8], steps[8:]):
        assert sorted(chain.from_iterable(step["long"] or [] for step in epoch)) == list(range(16))
        short: list[int] = list(chain.from_iterable(step["short"] or [] for step in epoch))
        assert sorted(short[:6]) == sorted(short[6:12]) == list(range(6))
        assert short[:6] != short[6:12]


def test_the_shorter_loader_begins_again_in_its_order_where_it_does_not_shuffle() -> None:
    steps = fit(Several(shuffle=False), Recorder())
    assert [step["short"] for step in steps[:8]] == [[0, 1], [2, 3], [4, 5], [0, 1], [2, 3], [4, 5], [0, 1], [2, 3]]


@pytest.mark.parametrize("mode", [None, "max_size", "min_size"])
@pytest.mark.parametrize("step", [2, 5])
def test_resumed_run_reads_what_the_interrupted_one_had_not(tmp_path: Path, mode: str | None, step: int) -> None:
    checkpoint = tmp_path / "step.ckpt"
    steps = fit(Several(mode), Recorder(step, checkpoint))
    assert fit(Several(mode), Recorder(), checkpoint) == steps[step:]


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(16))


def test_the_shorter_loader_begins_again_beside_one_of_unknown_length() -> None:
    class WithStream(Several):
        def train_dataloader(self) -> Any:
            return {"stream": DataLoader(Numbers(), 2), "short": self.loader(6)}

    steps = fit(WithStream(shuffle=False), Recorder())
    assert [step["short"] for step in steps[:8]] == [[0, 1], [2, 3], [4, 5], [0, 1], [2, 3], [4, 5], [0, 1], [2, 3]]
