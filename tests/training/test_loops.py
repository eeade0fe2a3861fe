"""Of the hooks of a step, those that nobody overrides are not called, and all others are."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.connectors.logger_connector import result
from lightning.pytorch.utilities.warnings import PossibleUserWarning
from torch import Tensor

from project.tracking.between_steps import BetweenSteps
from project.training.loops import install
from small_classifier import Classifier, loader, quiet_trainer


class Listening(Callback):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.calls.append("start of step")

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.calls.append("optimizer")

    def on_validation_batch_end(self, *_: Any) -> None:
        self.calls.append("validated")


class OwnHooks(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.norms: list[Tensor] = []

    def on_after_backward(self) -> None:
        self.norms.append(next(self.parameters()).grad.norm())  # type: ignore[union-attr]


HOOKS_OF_BATCHES = ("on_train_batch_start", "on_train_batch_end", "on_before_backward", "on_validation_batch_end")


@pytest.mark.parametrize("own_loops", [True, False])
def test_hooks_that_do_nothing_are_skipped_and_no_others(own_loops: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    idle, listening, model = Callback(), Listening(), OwnHooks()
    of_base: list[str] = []
    for name in HOOKS_OF_BATCHES:
        monkeypatch.setattr(Callback, name, lambda *_, name=name: of_base.append(name))
    trainer = quiet_trainer(1, "auto", callbacks=[idle, listening])
    if own_loops:
        install(trainer)
    trainer.fit(model, loader([4, 4]), loader([4]))
    assert listening.calls == ["start of step", "optimizer"] * 2 + ["validated"]
    assert len(model.norms) == 2
    assert set(of_base) == (set() if own_loops else set(HOOKS_OF_BATCHES))


def test_a_training_step_may_leave_out_the_batch_index() -> None:
    class Brief(Classifier):
        def training_step(self, batch: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
            return super().training_step(batch, 0)

    model = Brief()
    trainer = quiet_trainer(1, "auto")
    install(trainer)
    trainer.fit(model, loader([4, 4]))
    assert len(model.losses) == 2


def test_a_validation_is_due_before_its_loaders_draw_random_numbers(tmp_path: Path) -> None:
    """What is saved then is what a run goes on with that begins the validation anew."""
    states: dict[str, torch.Tensor] = {}

    class Notes(L.Callback, BetweenSteps):
        def on_train_batch_end(self, *_: Any) -> None:
            states["trained"] = torch.get_rng_state()

        def on_validation_due(self, trainer: L.Trainer) -> None:
            states["due"] = torch.get_rng_state()

        def on_validation_start(self, *_: Any) -> None:
            states["started"] = torch.get_rng_state()

    trainer = L.Trainer(
        accelerator="cpu", max_epochs=1, default_root_dir=tmp_path, callbacks=[Notes()], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    install(trainer)
    trainer.fit(Classifier().double(), loader([4, 4]), loader([4]))
    assert torch.equal(states["trained"], states["due"])
    assert not torch.equal(states["due"], states["started"])


class OfRankZero(Classifier):
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("of_one", 1.0, rank_zero_only=True)
        self.log("of_each", 1.0)


def test_what_rank_0_alone_logs_is_not_to_be_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for the others, which do not log it."""
    monkeypatch.setattr(result, "_distributed_is_initialized", lambda: True)
    result.warning_cache.clear()
    trainer = quiet_trainer(1, "auto")
    install(trainer)
    with pytest.warns(PossibleUserWarning) as told:
        trainer.fit(OfRankZero(), loader([4, 4]), loader([4]))
    texts = " ".join(str(warning.message) for warning in told)
    assert "self.log('of_each', ..., sync_dist=True)" in texts
    assert "self.log('of_one'" not in texts
