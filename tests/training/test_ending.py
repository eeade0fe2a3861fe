"""Why a training ended before its last epoch."""

from datetime import timedelta
from pathlib import Path

import lightning as L
import pytest
from lightning.pytorch.callbacks import EarlyStopping, Timer

from project.training.ending import ended_early
from small_classifier import UNEVEN, VALIDATION, Classifier, loader

NEVER_BETTER = EarlyStopping("val/accuracy", mode="max", patience=2, min_delta=10)


@pytest.mark.parametrize(
    ("callback", "max_epochs", "reason"),
    [
        (NEVER_BETTER, 9, "val/accuracy was not better in the last 2 validations"),
        (EarlyStopping("val/accuracy", mode="max", stopping_threshold=0.0), 9, "reached stopping_threshold=0.0"),
        (EarlyStopping("val/accuracy", mode="max", divergence_threshold=2.0), 9, "beyond divergence_threshold=2.0"),
        (Timer(timedelta(seconds=0)), 9, "trainer.max_time is over"),
        (EarlyStopping("val/accuracy", mode="max", patience=50), 2, None),  # all epochs were trained
        (Timer(timedelta(hours=1)), 2, None),
    ],
)
def test_what_ended_a_training_is_named(
    tmp_path: Path, callback: L.Callback, max_epochs: int, reason: str | None
) -> None:
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=max_epochs, default_root_dir=tmp_path, callbacks=[callback], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0, precision="64-true",
    )  # fmt: skip
    trainer.fit(Classifier(), loader(UNEVEN), loader(VALIDATION))
    told = ended_early(trainer)
    assert told is None if reason is None else told is not None and reason in told
