"""Models of a table's rows: what they measure, predict and keep."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torchmetrics.functional import mean_absolute_error, mean_squared_error, r2_score

from project.data import DataModule, TensorDataset
from project.models import Regressor, TabularClassifier

NET = {"_target_": "project.models.nets.MLP", "image_shape": [3], "num_classes": 1, "width": 16, "depth": 1}
ADAMW = {"_target_": "torch.optim.AdamW", "lr": 0.02}
SCALE = [1000.0, 50.0]


class Prices(DataModule):
    """37 rows whose target is a line through the features, around 1000."""

    def setup(self, stage: str | None = None) -> None:
        features = torch.randn(37, 3, generator=torch.Generator().manual_seed(0))
        target = features @ torch.tensor([40.0, -30.0, 0.0]) + 1000
        label = (target > 1000).long()
        rows = TensorDataset({"features": features, "target": target, "label": label})
        self.train_set = self.val_set = self.test_set = rows


def regressor(**arguments: Any) -> Regressor:
    return Regressor(**{"net": NET, "optimizer": ADAMW, "target_scale": SCALE} | arguments)


def trainer(folder: Path, **arguments: Any) -> L.Trainer:
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
    }
    return L.Trainer(**quiet | arguments)


def test_metrics_are_those_of_all_rows_in_the_targets_unit(tmp_path: Path) -> None:
    model, datamodule = regressor(), Prices(batch_size=10)
    (tested,) = trainer(tmp_path).test(model, datamodule=datamodule, verbose=False)
    rows = datamodule.test_set.tensors  # type: ignore[union-attr]
    predictions = model(rows["features"]).detach()
    assert tested == pytest.approx(
        {
            "test/rmse": mean_squared_error(predictions, rows["target"], squared=False).item(),
            "test/mae": mean_absolute_error(predictions, rows["target"]).item(),
            "test/r2": r2_score(predictions.double(), rows["target"].double()).item(),
        }
    )
    assert 900 < predictions.mean() < 1100  # the scale puts an untrained net there


def test_fitting_learns_the_line(tmp_path: Path) -> None:
    run = trainer(tmp_path, max_epochs=60)
    run.fit(regressor(), datamodule=Prices(batch_size=37))
    assert run.callback_metrics["val/r2"] > 0.95
    assert run.callback_metrics["val/rmse"] < 10


@pytest.mark.parametrize("compile_net", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_checkpoint_is_plain_data_and_rebuilds_the_regressor(tmp_path: Path, compile_net: bool) -> None:
    model = regressor(compile=compile_net)
    run = trainer(tmp_path)
    run.strategy.connect(model)
    run.save_checkpoint(tmp_path / "model.ckpt")
    state = torch.load(tmp_path / "model.ckpt", weights_only=True)
    assert set(state["state_dict"]) == set(regressor().state_dict())
    rebuilt = Regressor.load_from_checkpoint(tmp_path / "model.ckpt", weights_only=True)
    features = torch.randn(2, 3)
    # What is compiled rounds otherwise.
    torch.testing.assert_close(rebuilt.eval()(features), model.net.eval()._call_impl(features).squeeze(1) * 50 + 1000)


def test_prediction_passes_the_target_on_where_there_is_one() -> None:
    model, features = regressor(), torch.randn(4, 3)
    assert model.predict_step({"features": features}, 0).keys() == {"prediction"}
    with_target = model.predict_step({"features": features, "target": torch.ones(4)}, 0)
    assert torch.equal(with_target["prediction"], model(features))
    assert with_target["target"].tolist() == [1] * 4


def test_a_target_of_classes_is_refused() -> None:
    with pytest.raises(ValueError, match="type data.task=regression"):
        regressor(target_scale=None)


def test_classifier_reads_the_features(tmp_path: Path) -> None:
    model = TabularClassifier(net=NET | {"num_classes": 2}, optimizer=ADAMW, num_classes=2)
    run = trainer(tmp_path, max_epochs=40)
    run.fit(model, datamodule=Prices(batch_size=37))
    assert run.callback_metrics["val/accuracy"] > 0.9
