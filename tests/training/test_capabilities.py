"""What models and data of a user's own can be asked for."""

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from project.data import DigitsDataModule
from project.errors import UserError
from project.training.capabilities import batch_noted, forward_explained, unpredicting, untestable
from small_classifier import Classifier


class Bare(L.LightningModule):
    pass


class Forward(L.LightningModule):
    def forward(self, batch: Tensor) -> Tensor:
        return batch


def test_a_model_or_data_without_a_test_is_named() -> None:
    assert untestable(Classifier(), DigitsDataModule()) is None
    assert untestable(Bare(), DigitsDataModule()) == "Bare has no test_step"
    assert untestable(Classifier(), L.LightningDataModule()) == "LightningDataModule has no test_dataloader"


@pytest.mark.parametrize(("model", "can"), [(Bare(), False), (Forward(), True), (Classifier(), True)])
def test_a_model_predicts_by_its_step_or_its_forward(model: L.LightningModule, can: bool) -> None:
    assert (unpredicting(model) is None) is can


class OfImages(L.LightningModule):
    """Written for its input alone; the batch is a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 3)

    def forward(self, image: Tensor) -> Tensor:
        return self.net(image)


def predict(model: L.LightningModule, *tensors: Tensor) -> None:
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)
    with forward_explained(model):
        trainer.predict(model, DataLoader(TensorDataset(*tensors), batch_size=4))


def test_a_forward_that_takes_no_whole_batch_is_told_to_get_a_predict_step() -> None:
    with pytest.raises(UserError, match="OfImages has no predict_step.* a list of 2, .*return self\\(batch\\[0\\]\\)$"):
        predict(OfImages(), torch.randn(8, 6), torch.arange(8))


class OfImagesWithStep(OfImages):
    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(dim=2)  # an error of the user's own, which needs its traceback


def test_an_error_in_an_own_predict_step_stays_what_it_is() -> None:
    with pytest.raises(IndexError):
        predict(OfImagesWithStep(), torch.randn(8, 6), torch.arange(8))


class OfPairs(L.LightningModule):
    """The digits are dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(64, 10)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        image, label = batch
        return nn.functional.cross_entropy(self.net(image), label)


DIGITS = f"{DigitsDataModule.__module__}.DigitsDataModule"


def notes_of(model: L.LightningModule, data: Any, model_name: str, data_name: str, error: type[Exception]) -> list[str]:
    """What is added to the error of a first step on a data module, or on a loader for predictions."""
    trainer = L.Trainer(max_steps=1, logger=False, barebones=True, accelerator="cpu")
    config = {"model": {"_target_": model_name}, "data": {"_target_": data_name}}
    with pytest.raises(error) as raised, batch_noted(model, config):
        if isinstance(data, L.LightningDataModule):
            trainer.fit(model, datamodule=data)
        else:
            trainer.predict(model, data)
    return getattr(raised.value, "__notes__", [])


def test_an_own_model_for_pairs_is_told_how_a_dict_is_taken_apart() -> None:
    assert notes_of(OfPairs(), DigitsDataModule(), "mine.Model", DIGITS, TypeError) == [
        f"training_step got a batch of data._target_={DIGITS}, a dict with only image (64, 1, 8, 8), label (64,): use "
        'batch["image"], batch["label"] and make the net for these shapes, or type data._target_=MODULE.CLASS if the '
        "model is for other data"
    ]


def test_nothing_is_added_where_all_is_the_packages() -> None:
    assert notes_of(OfPairs(), DigitsDataModule(), "project.models.Any", DIGITS, TypeError) == []


class Pairs(L.LightningDataModule):
    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.randn(8, 64), torch.arange(8)), batch_size=4)


class OfDicts(OfPairs):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch["image"].flatten(1)), batch["label"])

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch["image"]) - batch["label"]


def test_an_own_model_for_dicts_is_told_of_the_pairs_of_own_data() -> None:
    assert notes_of(OfDicts(), Pairs(), "mine.Model", "mine.Data", TypeError) == [
        "training_step got a batch of data._target_=mine.Data, a list of 2, (4, 64), (4,): use batch[0], batch[1] and "
        "make the net for these shapes"
    ]


def test_a_model_of_the_package_on_own_data_is_told_where_its_batches_are_described() -> None:
    (told,) = notes_of(OfDicts(), Pairs(), "project.models.ImageClassifier", "mine.Data", TypeError)
    assert told.endswith("what the model's class says of its batches, or type model._target_=MODULE.CLASS")


def test_a_label_that_data_for_predictions_lack_is_told() -> None:
    data: Any = DataLoader([{"image": torch.zeros(64)}], batch_size=1)  # type: ignore[arg-type]
    (told,) = notes_of(OfDicts(), data, "mine.Model", DIGITS, KeyError)
    assert "a dict with only image (1, 64)" in told
    assert told.endswith("ask for a label only where there is one")


def test_a_label_beyond_the_nets_outputs_is_told_instead_of_the_batch() -> None:
    model = OfDicts()
    model.net = nn.Linear(64, 2)
    (told,) = notes_of(model, DigitsDataModule(), "mine.Model", DIGITS, IndexError)
    assert told.startswith("training_step got the label ")
    assert "let it give at least" in told


def test_a_net_for_other_shapes_is_told_the_batchs() -> None:
    model = OfDicts()
    model.net = nn.Linear(3 * 64, 10)
    (told,) = notes_of(model, DigitsDataModule(), "mine.Model", DIGITS, RuntimeError)
    assert "image (64, 1, 8, 8)" in told
    assert "make the net for these shapes" in told


@pytest.mark.parametrize(("name", "is_told"), [("no_such_attribute", False), ("net", True)])
def test_an_attribute_that_the_model_itself_lacks_is_no_matter_of_the_batch(name: str, is_told: bool) -> None:
    class Mistaken(OfDicts):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            getattr(self, name)
            return batch.image

    notes = notes_of(Mistaken(), DigitsDataModule(), "mine.Model", DIGITS, AttributeError)
    assert bool(notes) is is_told
