"""A monitor that can't work is refused before any training."""

import math
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor, nn
from torch.utils.data import DataLoader

from project.config.monitor_mode import check_mode, direction
from project.errors import UserError
from project.notices import Notice
from project.training.monitor_check import MonitorCheck


class Model(L.LightningModule):
    """Logs the given names in validation, and train/loss in training."""

    def __init__(self, logs: tuple[str, ...] = ("val/loss", "val/accuracy"), scheduler_monitor: str | None = None):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.logs = logs
        self.scheduler_monitor = scheduler_monitor
        self.steps = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.steps += 1
        loss: Tensor = self.layer(batch).square().mean()
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        for name in self.logs:
            self.log(name, 0.5)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        if self.scheduler_monitor is None:
            return optimizer
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": self.scheduler_monitor}}


class SeveralSets(Model):
    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val/loss", 0.5)


def fit(model: Model, monitor: str | None, *callbacks: L.Callback, sets: int = 1, epochs: int = 1) -> None:
    data: DataLoader[Tensor] = DataLoader(torch.randn(4, 1), batch_size=2)  # type: ignore[arg-type]
    L.Trainer(
        accelerator="cpu", max_epochs=epochs, num_sanity_val_steps=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[MonitorCheck(monitor), *callbacks],
    ).fit(model, data, [data] * sets if sets > 1 else data)  # fmt: skip


class Unvalidated(Model):
    validation_step = L.LightningModule.validation_step  # type: ignore[assignment]


@pytest.mark.parametrize("monitor", ["val/accuracy", None, "train/loss"])
def test_a_monitor_that_no_validation_will_find_is_told_before_training(
    monitor: str | None, recwarn: pytest.WarningsRecorder
) -> None:
    fit(Unvalidated(), monitor)
    told = [str(warning.message) for warning in recwarn if warning.category is Notice]
    assert bool(told) == (monitor == "val/accuracy")
    assert all("Unvalidated has no validation_step: monitor=val/accuracy will find nothing" in text for text in told)


@pytest.mark.parametrize("monitor", ["val/accuracy", "val/loss", None, "train/loss", "train_loss"])
def test_a_monitor_that_is_logged_or_will_be_in_training_is_let_through(monitor: str | None) -> None:
    model = Model()
    fit(model, monitor)
    assert model.steps == 2


@pytest.mark.parametrize(
    ("monitor", "logs", "end"),
    [
        ("val/acuracy", ("val/loss", "val/accuracy"), "(val/accuracy, val/loss): type monitor=val/accuracy"),
        ("zzz", ("val/loss", "val/accuracy"), "(val/accuracy, val/loss): type monitor=val/accuracy"),
        ("val/loss", (), "(nothing): type monitor=null"),
    ],
    ids=["nearest", "nothing_near", "nothing_logged"],
)
def test_a_monitor_that_is_not_logged_is_refused_with_the_nearest_before_any_step(
    monitor: str, logs: tuple[str, ...], end: str
) -> None:
    model = Model(logs)
    with pytest.raises(UserError) as info:
        fit(model, monitor)
    assert str(info.value) == f"monitor={monitor} is not among what Model logs in validation {end}"
    assert model.steps == 0


class NotFinite(Model):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val/loss", math.nan if self.steps else 0.5)
        self.log("val/accuracy", math.inf)


@pytest.mark.parametrize(
    ("monitor", "told"), [("val/loss", "nan after step 2"), ("val/accuracy", "inf after step 2"), (None, "")]
)
def test_a_monitored_value_that_is_not_finite_is_told_once(
    monitor: str | None, told: str, recwarn: pytest.WarningsRecorder
) -> None:
    fit(NotFinite(), monitor, epochs=3)
    notices = [str(warning.message) for warning in recwarn if warning.category is Notice]
    assert [f"monitor={monitor} is {told}" in text for text in notices] == ([True] if told else [])


@pytest.mark.parametrize("decides", ["config", "callback", "schedule"])
@pytest.mark.parametrize("of_other", [0.4, None], ids=["another_value", "not_logged"])
def test_a_value_that_the_ranks_do_not_share_is_refused_whatever_decides_by_it(
    monkeypatch: pytest.MonkeyPatch, decides: str, of_other: float | None
) -> None:
    def gather(of_ranks: list[Any], own: dict[str, float | None]) -> None:
        of_ranks[:] = [own, dict.fromkeys(own, of_other)]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    schedule = SimpleNamespace(monitor="val/loss", reduce_on_plateau=True)
    trainer: Any = SimpleNamespace(
        sanity_checking=False,
        global_step=2,
        world_size=2,
        callback_metrics={"val/loss": torch.tensor(0.5)},
        callbacks=[EarlyStopping("val/loss")] if decides == "callback" else [],
        lr_scheduler_configs=[schedule] if decides == "schedule" else [],
    )
    check = MonitorCheck("val/loss" if decides == "config" else None)
    with pytest.raises(UserError, match=rf"monitor=val/loss differs between the ranks \(0\.5, {of_other}\)"):
        check.on_validation_end(trainer, Model())
    of_other = 0.5
    check.on_validation_end(trainer, Model())


def test_what_a_callback_monitors_is_checked_too() -> None:
    model = Model()
    with pytest.raises(UserError, match="^a callback or scheduler: .*: give it monitor=val/loss"):
        fit(model, None, EarlyStopping("val/lss"))
    assert model.steps == 0


def test_what_a_schedule_monitors_is_checked_too() -> None:
    model = Model(scheduler_monitor="val/lss")
    with pytest.raises(UserError, match="^a callback or scheduler: .*: give it monitor=val/loss"):
        fit(model, None)
    assert model.steps == 0


def test_metrics_of_several_validation_sets_can_be_monitored() -> None:
    model = SeveralSets()
    fit(model, "val/loss/dataloader_idx_1", sets=2)
    assert model.steps == 2
    with pytest.raises(UserError, match=r"logs in validation \(val/loss/dataloader_idx_0, val/loss/dataloader_idx_1\)"):
        fit(SeveralSets(), "val/loss", sets=2)


def test_advice_comes_with_the_mode_that_its_name_asks_for() -> None:
    with pytest.raises(UserError, match=r"type monitor=val/loss mode=min$"):
        fit(Model(("val/loss",)), "val/los")


@pytest.mark.parametrize(
    ("metric", "better"),
    [
        ("val_loss", "min"),
        ("val/rmse", "min"),
        ("valid.acc", "max"),
        ("val/F1", "max"),
        ("val/closs", None),
        ("x", None),
    ],
)
def test_the_usual_names_say_which_is_better(metric: str, better: str | None) -> None:
    assert direction(metric) == better


@pytest.mark.parametrize(
    ("typed", "monitor", "mode", "refused"),
    [
        (["monitor=val/loss"], "val/loss", "max", "type mode=min too, or mode=max if that is meant"),
        (["monitor=val/accuracy"], "val/accuracy", "min", "type mode=max too, or mode=min if that is meant"),
        (["monitor=val/loss", "mode=max"], "val/loss", "max", None),
        (["mode=max"], "val/loss", "max", None),
        (["monitor=val/x"], "val/x", "max", None),
        (["monitor=null"], None, "max", None),
    ],
)
def test_a_typed_monitor_is_not_judged_by_the_mode_of_another(
    typed: list[str], monitor: str | None, mode: str, refused: str | None
) -> None:
    config = {"monitor": monitor, "mode": mode}
    if refused is None:
        check_mode(config, typed)
    else:
        with pytest.raises(UserError, match=refused):
            check_mode(config, typed)
