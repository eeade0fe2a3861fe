"""What models and data of a user's own can be asked for."""

import lightning as L
import pytest
from torch import Tensor

from project.data import DigitsDataModule
from project.launch.capabilities import unpredicting, untestable
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
