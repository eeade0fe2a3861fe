"""Of the hooks of a step, those that nobody overrides are not called, and all others are."""

from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from project.launch.loops import STEP_HOOKS, install
from small_classifier import Classifier, loader, quiet_trainer


class Listening(Callback):
    """Notes what is called, and what stands in place of another callback's hooks meanwhile."""

    def __init__(self, other: Callback) -> None:
        self.other = other
        self.calls: list[str] = []
        self.of_other: set[Any] = set()

    def on_train_batch_start(self, *_: Any) -> None:
        self.calls.append("start of step")
        self.of_other = {getattr(self.other, hook) for hook in STEP_HOOKS}

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.calls.append("optimizer")


class OwnHooks(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.norms: list[Tensor] = []

    def on_after_backward(self) -> None:
        self.norms.append(next(self.parameters()).grad.norm())  # type: ignore[union-attr]


def test_hooks_that_do_nothing_are_skipped_while_training_and_no_others() -> None:
    idle, model = Callback(), OwnHooks()
    listening = Listening(idle)
    trainer = quiet_trainer(1, "auto", callbacks=[idle, listening])
    install(trainer)
    trainer.fit(model, loader([4, 4]))
    assert listening.calls == ["start of step", "optimizer"] * 2
    assert listening.of_other == {None}
    assert len(model.norms) == 2
    for owner in (idle, listening, model):
        assert not vars(owner).keys() & set(STEP_HOOKS)  # as they were


def test_a_training_step_may_leave_out_the_batch_index() -> None:
    class Brief(Classifier):
        def training_step(self, batch: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
            return super().training_step(batch, 0)

    model = Brief()
    trainer = quiet_trainer(1, "auto")
    install(trainer)
    trainer.fit(model, loader([4, 4]))
    assert len(model.losses) == 2


def test_hooks_are_back_after_an_error() -> None:
    class Failing(Classifier):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            raise RuntimeError("no")

    model, idle = Failing(), Callback()
    trainer = quiet_trainer(1, "auto", callbacks=[idle])
    install(trainer)
    with pytest.raises(RuntimeError, match="no"):
        trainer.fit(model, loader([4]))
    assert callable(model.on_train_batch_start)
    assert callable(idle.on_train_batch_start)
