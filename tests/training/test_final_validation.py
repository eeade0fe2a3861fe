"""Runs that end within an epoch are validated at their end."""

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from project.training.final_validation import FinalValidation


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.validated_after: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch).mean()
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        pass

    def on_validation_epoch_end(self) -> None:
        self.validated_after.append(self.global_step)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("max_steps", "interval", "validated_after"),
    [(3, 1.0, [3]), (5, 2, [2, 4, 5]), (4, 2, [2, 4]), (10, 1.0, [10]), (13, 1.0, [10, 13]), (-1, 1.0, [10, 20])],
)
def test_the_last_step_is_validated_once_beside_those_at_intervals(
    max_steps: int, interval: float, validated_after: list[int]
) -> None:
    model = Model()
    data: DataLoader[Tensor] = DataLoader(torch.randn(10, 1), batch_size=1)  # type: ignore[arg-type]
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=2, max_steps=max_steps, val_check_interval=interval, num_sanity_val_steps=0,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[FinalValidation()],
    )  # fmt: skip
    trainer.fit(model, data, data)
    assert model.validated_after == validated_after
    assert trainer.global_step == validated_after[-1]
