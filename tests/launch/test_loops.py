"""Of the hooks of a step, those that nobody overrides are not called, and all others are."""

from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from project.launch.loops import install
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
