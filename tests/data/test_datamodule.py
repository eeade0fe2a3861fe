"""The loaders as a trainer meets them."""

from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from project.data import DataModule, TensorDataset


class Numbers(DataModule):
    """Samples that are their own index."""

    def setup(self, stage: str | None = None) -> None:
        self.train_set = TensorDataset({"x": torch.arange(20)})
        self.val_set = TensorDataset({"x": torch.arange(7)})
        self.test_set = TensorDataset({"x": torch.arange(5)})


class Recorder(L.LightningModule):
    """Learns nothing and remembers what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.epochs: dict[int, list[list[int]]] = {}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.epochs.setdefault(self.current_epoch, []).append(batch["x"].tolist())
        loss: Tensor = self.layer(batch["x"].float()[:, None]).mean()
        return loss

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return batch["x"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        _ = self.trainer.estimated_stepping_batches  # makes the loader early, as schedules do
        return torch.optim.SGD(self.parameters(), lr=0.0)


def quiet_trainer(folder: Path, **arguments: Any) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments,
    )


def fit(folder: Path, num_workers: int = 0, ckpt_path: Path | None = None, **arguments: Any) -> Recorder:
    model = Recorder()
    trainer = quiet_trainer(folder, **arguments)
    trainer.fit(model, datamodule=Numbers(batch_size=4, num_workers=num_workers, seed=3), ckpt_path=ckpt_path)
    return model


def expected_epochs(number: int) -> dict[int, list[list[int]]]:
    loader = loaded().train_dataloader()
    epochs = {}
    for epoch in range(number):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        epochs[epoch] = [batch["x"].tolist() for batch in loader]
    return epochs


def loaded(**arguments: Any) -> Numbers:
    datamodule = Numbers(**{"batch_size": 4, "seed": 3} | arguments)
    datamodule.setup()
    return datamodule


class SaveAtStep(L.Callback):
    def __init__(self, step: int, path: Path) -> None:
        self.step = step
        self.path = path

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_each_epoch_has_its_own_order_from_the_first_on(tmp_path: Path, num_workers: int) -> None:
    epochs = fit(tmp_path, num_workers, max_epochs=3).epochs
    assert epochs == expected_epochs(3)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("step", [7, 10])
def test_resumed_run_reads_what_the_interrupted_one_had_not(tmp_path: Path, num_workers: int, step: int) -> None:
    checkpoint = tmp_path / "step.ckpt"
    fit(tmp_path, max_epochs=3, callbacks=[SaveAtStep(step, checkpoint)])
    resumed = fit(tmp_path, num_workers, ckpt_path=checkpoint, max_epochs=3)
    batches = [batch for epoch in expected_epochs(3).values() for batch in epoch]
    assert list(chain.from_iterable(resumed.epochs.values())) == batches[step:]


def test_overfitting_repeats_the_same_batches(tmp_path: Path) -> None:
    epochs = fit(tmp_path, max_epochs=2, overfit_batches=2).epochs
    assert epochs == {0: [[0, 1, 2, 3], [4, 5, 6, 7]], 1: [[0, 1, 2, 3], [4, 5, 6, 7]]}


def test_train_loader_starts_at_the_first_batch_again_after_a_run(tmp_path: Path) -> None:
    datamodule = Numbers(batch_size=4)
    quiet_trainer(tmp_path, max_epochs=1).fit(Recorder(), datamodule=datamodule)
    assert len(list(datamodule.train_dataloader())) == 5


@pytest.mark.parametrize(("split", "length"), [("train", 20), ("val", 7), ("test", 5)])
def test_prediction_covers_the_chosen_split_in_its_order(tmp_path: Path, split: str, length: int) -> None:
    datamodule = Numbers(batch_size=4, predict_split=split)
    predictions = quiet_trainer(tmp_path).predict(Recorder(), datamodule=datamodule)
    assert torch.cat(predictions).tolist() == list(range(length))  # type: ignore[arg-type]


def test_ranks_share_the_global_batch_as_the_strategy_says() -> None:
    shares = []
    for rank in range(2):
        datamodule = loaded()
        strategy = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": 2, "rank": rank})
        datamodule.trainer = SimpleNamespace(strategy=strategy, training=False)  # type: ignore[assignment]
        shares.append([batch["x"].tolist() for batch in datamodule.train_dataloader()])
    assert [first + second for first, second in zip(*shares, strict=True)] == expected_epochs(1)[0]


class Squares(Dataset[dict[str, int]]):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"x": index**2}


@pytest.mark.parametrize(
    "dataset",
    [
        Squares(),
        TensorDataset({"x": torch.arange(5) ** 2}),
        Subset(Squares(), [0, 1, 2, 3, 4]),
        Subset(TensorDataset({"x": torch.arange(5) ** 2}), [0, 1, 2, 3, 4]),
    ],
    ids=["samples", "batches", "listed samples", "subset of batches"],
)
def test_every_kind_of_dataset_gives_batches(dataset: Any) -> None:
    datamodule = loaded()
    datamodule.val_set = dataset
    batches = [batch["x"].tolist() for batch in datamodule.val_dataloader()]
    assert batches == [[0, 1, 4], [9, 16]]


class Dice(Dataset[Tensor]):
    """Random samples, as from an augmentation."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.rand(())


def test_random_numbers_of_workers_differ_by_rank_and_epoch_and_repeat_by_seed() -> None:
    def throws(rank: int, epoch: int) -> list[float]:
        datamodule = loaded(num_workers=1)
        datamodule.train_set = Dice()
        strategy = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": 2, "rank": rank})
        datamodule.trainer = SimpleNamespace(strategy=strategy, training=False)  # type: ignore[assignment]
        loader = datamodule.train_dataloader()
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        return torch.cat(list(loader)).tolist()

    drawn = [throws(0, 0), throws(1, 0), throws(0, 1)]
    assert len({number for numbers in drawn for number in numbers}) == 12
    assert throws(0, 0) == drawn[0]


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        ({"batch_size": 0}, "data.batch_size=0 must be at least 1"),
        ({"num_workers": -1}, "data.num_workers=-1 must not be negative"),
        ({"predict_split": "dev"}, "data.predict_split=dev is unknown: type one of train, val, test"),
    ],
)
def test_impossible_arguments_are_refused(arguments: dict[str, Any], advice: str) -> None:
    with pytest.raises(ValueError, match=advice):
        DataModule(**arguments)


def test_a_split_that_setup_forgot_is_named() -> None:
    with pytest.raises(ValueError, match=r"DataModule.setup must set self.val_set"):
        DataModule().val_dataloader()


def test_tensors_of_different_lengths_are_no_dataset() -> None:
    with pytest.raises(ValueError, match="one length"):
        TensorDataset({"x": torch.zeros(3), "y": torch.zeros(4)})


class _OfTorchsConvention(Dataset[Any]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        return 100 * index

    def __getitems__(self, indices: list[int]) -> list[int]:
        assert all(type(index) is int for index in indices)
        return [self[index] for index in indices]


def test_getitems_gets_a_list_of_indices_as_torchs_loader_gives_it() -> None:
    datamodule = DataModule(batch_size=5, shuffle=False)
    datamodule.train_set = datamodule.val_set = _OfTorchsConvention()
    for loader in (datamodule.train_dataloader(), datamodule.val_dataloader()):
        assert [batch.tolist() for batch in loader] == [[0, 100, 200, 300, 400], [500, 600, 700, 800, 900]]
