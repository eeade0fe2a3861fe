"""What models and data of a user's own can be asked for."""

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from project.data import DigitsDataModule
from project.errors import UserError
from project.launch.capabilities import batch_noted, forward_explained, unpredicting, untestable
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


@pytest.mark.parametrize(("data", "is_told"), [(DIGITS, True), ("mine.Data", False)])
def test_an_error_of_the_first_step_says_what_its_batch_was_where_only_the_model_is_own(
    data: str, is_told: bool
) -> None:
    trainer = L.Trainer(max_steps=1, logger=False, barebones=True, accelerator="cpu")
    model = OfPairs()
    config = {"model": {"_target_": "mine.Model"}, "data": {"_target_": data}}
    with pytest.raises(TypeError, match="must be Tensor, not str") as raised, batch_noted(model, config):
        trainer.fit(model, datamodule=DigitsDataModule())
    told = (
        f"training_step got a batch of data._target_={DIGITS}, a dict with image, label: if it is not made for that, "
        "type data._target_=MODULE.CLASS with what goes with it"
    )
    assert getattr(raised.value, "__notes__", []) == ([told] if is_told else [])
