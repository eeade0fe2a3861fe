"""Evaluating and predicting from a checkpoint alone."""

import csv
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from comparison import Run
from faults.noisy import NoisyModel
from project.config.from_checkpoint import compose_from_checkpoint
from project.errors import UserError

pytestmark = pytest.mark.slow

QUIET = ("trainer.enable_progress_bar=false", "trainer.enable_model_summary=false")


@pytest.fixture
def again(run: Run) -> Run:
    """``again("evaluate", folder, ...)``: a command from the best checkpoint of a run."""

    def start(command: str, folder: Path, *options: str) -> tuple[Path, dict[str, float]]:
        arguments = [command, f"ckpt_path={folder}/checkpoints/best.ckpt", *options]
        config = compose_from_checkpoint(command, arguments)
        return run(*arguments[1:], "trainer.enable_progress_bar=false", command=command, config=config)

    return start


@pytest.fixture
def trained(run: Run) -> tuple[Path, dict[str, float]]:
    """A run whose data and net are not the default ones: 7 samples to test, which 2 and 4 ranks can't share evenly."""
    options = ("model/net=residual_cnn", "model.net.width=4", "data=synthetic", "data.length=128", "data.test_length=7")
    return run(*QUIET, *options, "data.image_shape=[1,8,8]", "data.batch_size=16", "trainer.max_epochs=1")


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_evaluation_needs_only_the_path_and_repeats_the_runs_own_test(
    trained: tuple[Path, dict[str, float]], again: Run, devices: int
) -> None:
    folder, metrics = trained
    _, repeated = again("evaluate", folder, f"trainer.devices={devices}")
    for name in ("test/loss", "test/accuracy", "test/f1"):
        assert f"{repeated[name]:.4f}" == f"{metrics[name]:.4f}"


def test_what_is_typed_wins_over_the_checkpoint(trained: tuple[Path, dict[str, float]], again: Run) -> None:
    folder, metrics = trained
    _, repeated = again("evaluate", folder, "data.test_length=64", "split=test")
    assert repeated["test/loss"] != pytest.approx(metrics["test/loss"])
    _, validated = again("evaluate", folder, "split=val")
    assert validated["val/loss"] == pytest.approx(metrics["val/loss"], abs=1e-5)


class Untested(NoisyModel):
    test_step = L.LightningModule.test_step


def test_a_model_that_has_no_test_is_told(run: Run, again: Run) -> None:
    own = ("data._target_=faults.noisy.NoisyData", f"model._target_={__name__}.Untested", "monitor=val/loss")
    folder, _ = run(*QUIET, *own, "mode=min", "data.batch_size=16", "trainer.max_epochs=1", "logger=none")
    with pytest.raises(UserError, match="Untested has no test_step: define it, or type split=val"):
        again("evaluate", folder)
    assert "val/loss" in again("evaluate", folder, "split=val")[1]


class Rows(L.LightningDataModule):
    def loader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.eye(6), torch.arange(6)), 3)

    train_dataloader = val_dataloader = predict_dataloader = loader


class Sorting(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 6)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).argmax(dim=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters())


def test_a_split_that_an_own_predict_dataloader_would_ignore_is_refused(run: Run, again: Run) -> None:
    own = (f"data._target_={__name__}.Rows", f"model._target_={__name__}.Sorting", "monitor=val_loss", "mode=min")
    folder, _ = run(*QUIET, *own, "trainer.max_epochs=1", "logger=none", "test=false")
    with pytest.raises(UserError, match=r"split=val was typed, and Rows\.predict_dataloader decides"):
        again("predict", folder, "split=val")
    assert again("predict", folder)[1] == {"samples": 6}


def test_other_architecture_is_told(trained: tuple[Path, dict[str, float]], again: Run) -> None:
    with pytest.raises(UserError, match="holds another architecture than the config builds .*size mismatch"):
        again("evaluate", trained[0], "model.net.width=6")


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_prediction_has_one_row_per_sample_in_the_order_of_the_data(run: Run, again: Run, devices: int) -> None:
    folder, metrics = run(*QUIET, "trainer.devices=1")
    rows = read_rows(again("predict", folder, f"trainer.devices={devices}")[0] / "predictions.csv")
    assert [int(row["index"]) for row in rows] == list(range(270))
    right = sum(row["prediction"] == row["label"] for row in rows)
    assert right / 270 == pytest.approx(metrics["test/accuracy"])
    on_one = read_rows(again("predict", folder, "trainer.devices=1")[0] / "predictions.csv")
    assert [row["prediction"] for row in rows] == [row["prediction"] for row in on_one]


def test_predictions_come_as_parquet_and_of_any_split(run: Run, again: Run) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    folder, _ = run(*QUIET, "trainer.devices=1")
    predictions, metrics = again("predict", folder, "format=parquet", "split=val", "trainer.devices=2")
    table = parquet.read_table(predictions / "predictions.parquet")
    assert table.column("index").to_pylist() == list(range(int(metrics["samples"])))
    assert {"prediction", "confidence", "label"} <= set(table.column_names)


def test_compiled_model_evaluates_without_compiling(run: Run, again: Run) -> None:
    folder, metrics = run(*QUIET, "debug=fast", "model.compile=true", "model.net.width=8")
    _, repeated = again("evaluate", folder, "model.compile=false")
    assert repeated["test/loss"] == pytest.approx(metrics["test/loss"], abs=1e-5)


def test_printed_numbers_are_those_of_the_runs_own_test(run_cli: Any) -> None:
    trained = run_cli("train", *QUIET, "trainer.max_epochs=1", "trainer.devices=2", "paths.run_dir=run")
    evaluated = run_cli("evaluate", "ckpt_path=run/checkpoints/best.ckpt", "trainer.devices=2")
    assert test_rows(trained.stdout) == test_rows(evaluated.stdout)
    assert len(test_rows(trained.stdout)) == 3


def test_rows(table: str) -> list[list[str]]:
    return [line.strip("│ ").split()[:3] for line in table.splitlines() if "test/" in line]


test_rows.__test__ = False  # type: ignore[attr-defined]


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
