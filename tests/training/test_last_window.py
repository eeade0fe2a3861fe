"""The step over the last batches of an epoch."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from project.training.last_window import LastWindow

BATCHES = torch.tensor([[1.0], [2.0], [4.0], [8.0], [16.0]])


class Sum(L.LightningModule):
    """The gradient of the weight is the batch itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.weight * batch.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1.0)


@pytest.mark.parametrize(
    ("accumulated", "expected"),
    [
        (1, 1 + 2 + 4 + 8 + 16),
        (2, (1 + 2) / 2 + (4 + 8) / 2 + 16),
        (3, (1 + 2 + 4) / 3 + (8 + 16) / 2),
        (9, (1 + 2 + 4 + 8 + 16) / 5),
    ],
)
def test_the_last_step_of_an_epoch_is_the_mean_over_its_batches(
    tmp_path: Path, accumulated: int, expected: float
) -> None:
    arguments: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False}
    model = Sum()
    L.Trainer(
        default_root_dir=tmp_path,
        max_epochs=2,  # the window begins anew with each epoch
        accumulate_grad_batches=accumulated,
        callbacks=[LastWindow()],
        **arguments,
        **quiet,
    ).fit(model, DataLoader(BATCHES, batch_size=None))  # type: ignore[arg-type]
    assert float(model.weight.detach()) == pytest.approx(-2 * expected)
