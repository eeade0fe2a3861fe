"""A classifier of images, whatever the net."""

from typing import Any, ClassVar

import lightning as L
import torch
from hydra.utils import instantiate
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix, MulticlassF1Score

from project.models.loggers import takers
from project.models.metrics import SampleMean
from project.models.optimization import configure

Batch = dict[str, Tensor]


class ImageClassifier(L.LightningModule):
    """Cross-entropy training, and loss, accuracy and F1 of every evaluation, over all ranks' samples.

    Batch: `{"image": (B, C, H, W), "label": (B,) int64}`; for prediction the label is optional. Subclasses may classify
    what stands under another name than `image`: `inputs`.

    The arguments are plain data, so that checkpoints load with `weights_only=True` and rebuild the module.

    Args:
        net: `_target_` and arguments of a module from (B, C, H, W) to logits (B, num_classes).
        optimizer: See `project.models.optimization.configure`.
        scheduler: Likewise.
        num_classes: Number of labels.
        compile: Compile the net.
        channels_last: Keep pictures and convolutions' weights with the channels innermost, as tensor cores read them.
    """

    inputs: ClassVar[str] = "image"

    def __init__(
        self,
        net: dict[str, Any],
        optimizer: dict[str, Any],
        scheduler: dict[str, Any] | None = None,
        num_classes: int = 10,
        compile: bool = False,  # noqa: A002
        channels_last: bool = False,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.net: nn.Module = instantiate(net, _convert_="all")
        self.memory_format = torch.channels_last if channels_last else torch.preserve_format
        if channels_last:
            self.net.to(memory_format=torch.channels_last)
        if compile:
            self.net.compile()  # in place: torch.compile(net) would rename the weights in checkpoints
        metrics = _evaluation_metrics(num_classes)
        self.val_metrics = metrics.clone(prefix="val/")
        self.test_metrics = metrics.clone(prefix="test/")
        # Normalized, so that it stays right where ranks split one model and each counts the same samples.
        self.confusion_matrix = MulticlassConfusionMatrix(num_classes, normalize="true", validate_args=False)

    def forward(self, image: Tensor) -> Tensor:
        logits: Tensor = self.net(image.to(memory_format=self.memory_format))
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        # Not logged here: the tracking callback logs train/loss, averaged over the ranks, beside the learning
        # rate and the gradient norm.
        return cross_entropy(self(batch[self.inputs]), batch["label"])

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, self.val_metrics)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        logits = self._evaluate(batch, self.test_metrics)
        self.confusion_matrix.update(logits, batch["label"])

    def predict_step(self, batch: Batch, batch_idx: int) -> Batch:
        """`{"prediction": (B,) int64, "confidence": (B,) in [0, 1]}`, and the label if there is one."""
        confidence, prediction = self(batch[self.inputs]).softmax(dim=1).max(dim=1)
        result = {"prediction": prediction, "confidence": confidence}
        return result | {"label": batch["label"]} if "label" in batch else result

    # Metrics are logged as objects, and at the end of the epoch only: Lightning then computes each once, over
    # the samples of all ranks, and resets it; batches cost no logging.
    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.val_metrics, prog_bar=True)

    def on_test_epoch_end(self) -> None:
        self.log_dict(self.test_metrics)
        confusion = self.confusion_matrix.compute()  # on all ranks, since it communicates
        self.confusion_matrix.reset()
        if self.trainer.is_global_zero:
            for taker in takers(self.loggers, "add_figure"):
                taker.add_figure("test/confusion_matrix", confusion_figure(confusion), self.global_step)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        return configure(self, self.hparams["optimizer"], self.hparams["scheduler"])

    def _evaluate(self, batch: Batch, metrics: MetricCollection) -> Tensor:
        logits: Tensor = self(batch[self.inputs])
        losses = cross_entropy(logits, batch["label"], reduction="none")
        metrics.update(value=losses, preds=logits, target=batch["label"])
        return logits


def _evaluation_metrics(num_classes: int) -> MetricCollection:
    # No validation of arguments and no search for NaN: both would wait for the device in every batch.
    return MetricCollection(
        {
            "loss": SampleMean(),
            "f1": MulticlassF1Score(num_classes, average="macro", validate_args=False),
            "accuracy": MulticlassAccuracy(num_classes, average="micro", validate_args=False),
        },
        # Accuracy is computed from F1's counts per class, which are updated once for both.
        compute_groups=[["loss"], ["f1", "accuracy"]],
    )


def confusion_figure(confusion: Tensor) -> Any:
    """A matplotlib figure of a matrix (true classes, predicted classes) of fractions."""
    from matplotlib.figure import Figure  # here, because only rank 0 needs it, once

    num_classes = len(confusion)
    side_inches = min(12.0, 2 + 0.4 * num_classes)
    figure = Figure(figsize=(side_inches, side_inches), layout="constrained")
    axes = figure.subplots()
    axes.imshow(confusion.tolist(), cmap="Blues", vmin=0, vmax=1)
    axes.set(xlabel="predicted class", ylabel="true class")
    if num_classes <= 20:
        axes.set(xticks=range(num_classes), yticks=range(num_classes))
        for true, predicted in torch.nonzero(confusion).tolist():
            fraction = float(confusion[true, predicted])
            color = "white" if fraction > 0.5 else "black"
            axes.text(predicted, true, f"{fraction:.2f}", ha="center", va="center", size=7, color=color)
    return figure
