"""Models of rows of a table: a class or a number from the features of each."""

from collections.abc import Sequence
from typing import Any

import lightning as L
from hydra.utils import instantiate
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torchmetrics import Metric, MetricCollection, R2Score

from project.models.image_classifier import Batch, ImageClassifier
from project.models.metrics import SampleMean
from project.models.optimization import configure


class TabularClassifier(ImageClassifier):
    """The classifier of images, but of `{"features": (B, F), "label": (B,) int64}`."""

    inputs = "features"


class Regressor(L.LightningModule):
    """Trained on the squared error; measured in the target's own unit.

    Batch: `{"features": (B, F), "target": (B,)}`; for prediction the target is optional.

    The net predicts the target in standard deviations from its mean, so that learning rates mean the same for any unit.
    The arguments are plain data, so that checkpoints load with `weights_only=True` and rebuild the module.

    Args:
        net: `_target_` and arguments of a module from (B, F) to (B, 1).
        optimizer: See `project.models.optimization.configure`.
        scheduler: Likewise.
        target_scale: Mean and standard deviation of the target.
        compile: Compile the net.

    Raises:
        ValueError: There is no scale, as for data whose target are classes.
    """

    def __init__(
        self,
        net: dict[str, Any],
        optimizer: dict[str, Any],
        scheduler: dict[str, Any] | None = None,
        target_scale: Sequence[float] | None = (0.0, 1.0),
        compile: bool = False,  # noqa: A002
    ) -> None:
        super().__init__()
        if target_scale is None:
            raise ValueError("model=regressor needs a target of numbers: type data.task=regression")
        self.save_hyperparameters(logger=False)
        self.mean, self.std = target_scale
        self.net: nn.Module = instantiate(net, _convert_="all")
        if compile:
            self.net.compile()  # in place: torch.compile(net) would rename the weights in checkpoints
        self.val_metrics = _evaluation_metrics(prefix="val/")
        self.test_metrics = _evaluation_metrics(prefix="test/")

    def forward(self, features: Tensor) -> Tensor:
        """Features (B, F) to predictions (B,) in the target's unit."""
        return self._standardized(features) * self.std + self.mean

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        target = (batch["target"] - self.mean) / self.std
        return mse_loss(self._standardized(batch["features"]), target)  # train/loss is logged by the tracking callback

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.val_metrics.update(self(batch["features"]), batch["target"])

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.test_metrics.update(self(batch["features"]), batch["target"])

    def predict_step(self, batch: Batch, batch_idx: int) -> Batch:
        """`{"prediction": (B,)}`, and the target if there is one."""
        result = {"prediction": self(batch["features"])}
        return result | {"target": batch["target"]} if "target" in batch else result

    # Logged as objects and once an epoch: computed over the rows of all ranks.
    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.val_metrics, prog_bar=True)

    def on_test_epoch_end(self) -> None:
        self.log_dict(self.test_metrics)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        return configure(self, self.hparams["optimizer"], self.hparams["scheduler"])

    def _standardized(self, features: Tensor) -> Tensor:
        prediction: Tensor = self.net(features)
        return prediction.squeeze(1)


class MeanAbsoluteError(SampleMean):
    """How far predictions are from the target, on average."""

    def update(self, prediction: Tensor, target: Tensor) -> None:  # type: ignore[override]
        super().update((prediction - target).abs())


class RootMeanSquaredError(SampleMean):
    """The same, where large errors count more: their squares are averaged, and the root is taken."""

    def update(self, prediction: Tensor, target: Tensor) -> None:  # type: ignore[override]
        super().update((prediction - target).square())

    def compute(self) -> Tensor:
        return super().compute().sqrt()


class PreciseR2(R2Score):
    """torchmetrics' R2 in float64 where there is one: it subtracts sums of squares, which in float32 are alike."""

    def update(self, prediction: Tensor, target: Tensor) -> None:
        if prediction.device.type != "mps":
            prediction, target = prediction.double(), target.double()
        super().update(prediction, target)


def _evaluation_metrics(prefix: str) -> MetricCollection:
    metrics: dict[str, Metric | MetricCollection] = {
        "rmse": RootMeanSquaredError(),
        "mae": MeanAbsoluteError(),
        "r2": PreciseR2(),
    }
    return MetricCollection(metrics, prefix=prefix, compute_groups=False)
