"""The classifier's metrics, checkpoints and predictions."""

import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.nn.functional import cross_entropy
from torchmetrics.functional.classification import multiclass_f1_score

from project.data import DataModule, TensorDataset
from project.models import ImageClassifier
from project.models.image_classifier import confusion_figure


class Blobs(DataModule):
    """25 images of noise of 4 classes: evaluation batches of 10 and fewer."""

    def setup(self, stage: str | None = None) -> None:
        generator = torch.Generator().manual_seed(0)
        image = torch.randn(25, 1, 4, 4, generator=generator)
        label = torch.randint(4, (25,), generator=generator)
        self.train_set = self.val_set = self.test_set = TensorDataset({"image": image, "label": label})


def classifier(**arguments: Any) -> ImageClassifier:
    net = {
        "_target_": "project.models.nets.MLP",
        "image_shape": [1, 4, 4],
        "num_classes": 4,
        "width": 8,
        "depth": 1,
    }
    optimizer = {"_target_": "torch.optim.AdamW", "lr": 0.01}
    defaults: dict[str, Any] = {"net": net, "optimizer": optimizer, "num_classes": 4}
    return ImageClassifier(**defaults | arguments)


QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "max_epochs": 2,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def trainer(folder: Path, **arguments: Any) -> L.Trainer:
    return L.Trainer(**QUIET | {"default_root_dir": folder} | arguments)


def expected_metrics(model: ImageClassifier, datamodule: Blobs) -> dict[str, float]:
    tensors = datamodule.test_set.tensors  # type: ignore[union-attr]
    logits, label = model.eval()(tensors["image"]), tensors["label"]
    return {
        "loss": cross_entropy(logits, label).item(),
        "f1": multiclass_f1_score(logits, label, num_classes=4, average="macro").item(),
        "accuracy": (logits.argmax(1) == label).float().mean().item(),
    }


def test_metrics_are_those_of_the_whole_set_in_every_epoch(tmp_path: Path) -> None:
    model, datamodule = classifier(), Blobs(batch_size=10)
    run = trainer(tmp_path)
    run.fit(model, datamodule=datamodule)
    after_second_epoch = {f"val/{key}": value for key, value in expected_metrics(model, datamodule).items()}
    assert {name: value.item() for name, value in run.callback_metrics.items()} == pytest.approx(after_second_epoch)
    for _ in range(2):
        (tested,) = run.test(model, datamodule=datamodule, verbose=False)
        assert tested == pytest.approx(
            {f"test/{key}": value for key, value in expected_metrics(model, datamodule).items()}
        )


def test_fitting_learns(tmp_path: Path) -> None:
    model, datamodule = classifier(), Blobs(batch_size=25)
    datamodule.setup()
    before = expected_metrics(model, datamodule)["loss"]
    trainer(tmp_path, max_epochs=20, limit_val_batches=0).fit(model.train(), datamodule=datamodule)
    assert expected_metrics(model, datamodule)["loss"] < before - 0.1


@pytest.mark.parametrize("compile_net", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_checkpoint_is_plain_data_and_rebuilds_the_classifier(tmp_path: Path, compile_net: bool) -> None:
    model = classifier(compile=compile_net)
    scheduler = {"_target_": "torch.optim.lr_scheduler.ConstantLR"}
    run = trainer(tmp_path, limit_train_batches=0, limit_val_batches=0)
    run.fit(classifier(scheduler=scheduler), datamodule=Blobs(batch_size=5))
    run.strategy.connect(model)
    run.save_checkpoint(tmp_path / "model.ckpt")

    checkpoint = torch.load(tmp_path / "model.ckpt", weights_only=True)
    assert set(checkpoint["state_dict"]) == set(classifier().state_dict())
    assert checkpoint["hyper_parameters"]["net"]["_target_"] == "project.models.nets.MLP"
    rebuilt = ImageClassifier.load_from_checkpoint(tmp_path / "model.ckpt")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), rebuilt.parameters(), strict=True))


def test_compiling_leaves_the_names_of_the_weights() -> None:
    compiled = classifier(compile=True)
    assert list(compiled.state_dict()) == list(classifier().state_dict())
    assert compiled.net._compiled_call_impl is not None


def test_channels_last_reaches_weights_and_pictures_and_leaves_the_numbers() -> None:
    net = {"_target_": "project.models.nets.ResidualCNN", "image_shape": [3, 8, 8], "num_classes": 4, "width": 8}
    model, plain = (classifier(net=net, channels_last=flag).eval() for flag in (True, False))
    plain.load_state_dict(model.state_dict())
    seen: list[torch.Tensor] = []
    model.net.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    image = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(model(image), plain(image))
    convolutions = [module for module in model.modules() if isinstance(module, torch.nn.Conv2d)]
    for tensor in (seen[0], *(convolution.weight for convolution in convolutions)):
        assert tensor.is_contiguous(memory_format=torch.channels_last)


def test_confusion_matrix_is_drawn_once_into_tensorboard(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, name="", version="")
    trainer(tmp_path, logger=logger).test(classifier(), datamodule=Blobs(batch_size=10), verbose=False)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert len(events.Images("test/confusion_matrix")) == 1
    assert {"test/loss", "test/accuracy", "test/f1"} <= set(events.Tags()["scalars"])


def test_confusion_figure_shows_the_fractions() -> None:
    figure = confusion_figure(torch.tensor([[0.25, 0.75], [0.0, 1.0]]))
    assert [text.get_text() for text in figure.axes[0].texts] == ["0.25", "0.75", "1.00"]


def test_evaluation_raises_no_warning_about_metrics(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(tmp_path).test(classifier(), datamodule=Blobs(batch_size=10), verbose=False)
    assert not [warning for warning in caught if "metric" in str(warning.message)]


@pytest.mark.parametrize("keys", [{"image", "label"}, {"image"}])
def test_prediction_gives_class_and_confidence_and_passes_the_label_on(keys: set[str]) -> None:
    datamodule = Blobs()
    datamodule.setup()
    batch = {key: tensor for key, tensor in datamodule.test_set.tensors.items() if key in keys}  # type: ignore[union-attr]
    model = classifier()
    result = model.predict_step(batch, 0)
    assert set(result) == {"prediction", "confidence"} | (keys - {"image"})
    probability = model(batch["image"]).softmax(1)
    assert torch.equal(result["prediction"], probability.argmax(1))
    assert torch.allclose(result["confidence"], probability.amax(1))
