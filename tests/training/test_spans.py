"""Of which steps and ranks metrics are that a model of a user's own logs."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
from torch import Tensor
from torchmetrics.aggregation import MeanMetric

from project.tracking.curves import TrainingCurves
from project.training import spans
from small_classifier import Classifier, loader, mlp


class Logging(Classifier):
    def __init__(self) -> None:
        super().__init__(mlp())
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        self.log("plain", loss)
        self.log("both", loss, on_epoch=True, on_step=True)
        self.log("synced", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.mean(float(batch_idx))
        self.log("val_metric", self.mean)
        self.log("val_own", float(batch_idx))


@pytest.mark.parametrize("replicas", [1, 2])
def test_what_is_of_a_step_and_what_of_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replicas: int) -> None:
    monkeypatch.setattr(spans, "num_model_replicas", lambda _: replicas)
    trainer = L.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_model_summary=False, max_epochs=2,
        enable_progress_bar=False, default_root_dir=tmp_path, callbacks=[TrainingCurves()], log_every_n_steps=1,
    )  # fmt: skip
    trainer.fit(Logging().double(), loader([4] * 2), loader([4] * 2))
    results = trainer.fit_loop.epoch_loop._results
    results["training_step.synced"].meta.sync.should = True  # as Lightning has it where there are several processes
    of_steps = spans.of_steps(trainer)
    own = {name for name, span in of_steps.items() if span == "the last step"}
    assert {"plain", "both_step"} <= own
    assert not own & {"both", "both_epoch", "synced", "val_metric", "val_own"}
    assert of_steps["train/lr"] == "the last logged steps"
    told = {"plain", "both", "both_step", "both_epoch", "val_own"}
    assert set(spans.of_rank_0(trainer)) & {*told, "synced", "val_metric"} == (told if replicas > 1 else set())
