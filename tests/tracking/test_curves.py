"""The training curves, against values computed by hand."""

import math
import time
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from project.tracking import curves
from project.tracking.curves import TrainingCurves, read_at_once

LR = 0.1
START = (1.0, -2.0)
SAMPLES = [[float(i % 5), float(i % 3) - 1.0] for i in range(20)]  # the last batch of 3 holds two


class Points(Logger):
    """Keeps what it is told, by name: [(step, value), ...]."""

    name = "points"
    version = ""

    def __init__(self) -> None:
        super().__init__()
        self.curves: dict[str, list[tuple[int, float]]] = {}

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        for name, value in metrics.items():
            self.curves.setdefault(name, []).append((step or 0, value))

    def log_hyperparams(self, *_: Any, **__: Any) -> None: ...


class Plane(L.LightningModule):
    """loss = mean over the batch of x . w, whose gradient is the mean of x."""

    def __init__(self, schedule: bool = False) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(START))
        self.schedule = schedule

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (batch @ self.w).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=LR)
        if not self.schedule:
            return optimizer
        halved = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": halved, "interval": "step"}}


def fit(interval: int, model: L.LightningModule | None = None, **arguments: Any) -> tuple[Points, TrainingCurves]:
    points, callback = Points(), TrainingCurves()
    defaults: dict[str, Any] = {
        "accelerator": "cpu", "max_epochs": 2, "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False, "num_sanity_val_steps": 1, "logger": points,
        "log_every_n_steps": interval,
    }  # fmt: skip
    arguments["callbacks"] = [callback, *arguments.pop("callbacks", [])]
    data: Any = DataLoader(torch.tensor(SAMPLES), batch_size=3)  # type: ignore[arg-type]
    L.Trainer(**defaults | arguments).fit(model or Plane(), data, data)
    return points, callback


def by_hand(interval: int, accumulate: int, epochs: int = 2, clip: float = math.inf) -> tuple[list[float], list[float]]:
    """Loss and gradient norm of each point, in plain Python."""
    w, losses, norms, steps = list(START), [], [], 0
    weighted, count = 0.0, 0
    gradient = [0.0, 0.0]
    batches = [SAMPLES[i : i + 3] for i in range(0, len(SAMPLES), 3)]
    for _ in range(epochs):
        for number, batch in enumerate(batches, start=1):
            mean = [sum(x[d] for x in batch) / len(batch) for d in (0, 1)]
            weighted += sum(m * v for m, v in zip(mean, w, strict=True)) * len(batch)
            count += len(batch)
            gradient = [g + m / accumulate for g, m in zip(gradient, mean, strict=True)]
            if number % accumulate and number < len(batches):
                continue
            steps += 1
            norm = math.hypot(*gradient)
            w = [v - LR * g * min(1.0, clip / norm) for v, g in zip(w, gradient, strict=True)]
            gradient = [0.0, 0.0]
            if steps % interval == 0:
                losses.append(weighted / count)
                norms.append(norm)
                weighted, count = 0.0, 0
    return losses, norms


class WithoutOptimizer(Plane):
    def configure_optimizers(self) -> None:
        return None


def test_a_model_without_an_optimizer_has_a_loss_and_no_learning_rate() -> None:
    points, _ = fit(1, WithoutOptimizer())
    assert set(points.curves) & set(TrainingCurves.NAMES) == {"train/loss"}


@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("interval", [1, 2, 5])
def test_loss_is_the_mean_over_the_samples_since_the_last_point_and_the_norm_that_of_the_step(
    interval: int, accumulate: int
) -> None:
    points, _ = fit(interval, accumulate_grad_batches=accumulate)
    losses, norms = by_hand(interval, accumulate)
    assert [value for _, value in points.curves["train/loss"]] == pytest.approx(losses, rel=1e-5, abs=1e-5)
    assert [value for _, value in points.curves["train/grad_norm"]] == pytest.approx(norms, rel=1e-5)
    steps = [step for step, _ in points.curves["train/loss"]]
    assert steps == [interval * (number + 1) - 1 for number in range(len(losses))]


def test_the_norm_is_that_before_clipping() -> None:
    points, _ = fit(1, gradient_clip_val=0.25)
    losses, norms = by_hand(1, 1, clip=0.25)
    assert max(norms) > 0.25
    assert [value for _, value in points.curves["train/grad_norm"]] == pytest.approx(norms, rel=1e-5)
    assert [value for _, value in points.curves["train/loss"]] == pytest.approx(losses, rel=1e-4)


def test_fewer_steps_than_the_interval_make_no_point() -> None:
    points, callback = fit(50)
    assert points.curves == {}
    assert callback.samples == 40


def test_the_learning_rate_is_that_of_the_step_not_of_the_next() -> None:
    points, _ = fit(2, Plane(schedule=True), max_epochs=1)
    assert [value for _, value in points.curves["train/lr"]] == pytest.approx([LR / 2, LR / 8, LR / 32])


def test_the_last_loss_is_a_result_of_the_run() -> None:
    callback = TrainingCurves()
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=1, enable_checkpointing=False, enable_progress_bar=False, logger=False,
        enable_model_summary=False, log_every_n_steps=7, callbacks=[callback],
    )  # fmt: skip
    trainer.fit(Plane(), DataLoader(torch.tensor(SAMPLES), batch_size=3))  # type: ignore[arg-type]
    assert trainer.callback_metrics["train/loss"].item() == pytest.approx(by_hand(7, 1, epochs=1)[0][-1], rel=1e-5)


def test_on_an_accelerator_losses_are_summed_up_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a CPU in its place: the total is there already."""
    callback = TrainingCurves()
    callback._total = torch.zeros((), dtype=torch.float64)
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "item", lambda _: pytest.fail("waits for the device"))
        for loss, weight in ((torch.tensor(1e8), 3), (torch.tensor([0.5]), 1), (torch.tensor(2.5).bfloat16(), 2)):
            callback._add(loss, weight)
            callback._count += weight
        mean = callback._mean_loss(callback._total, world_size=1)
    assert mean.item() == (3e8 + 0.5 + 5) / 6
    resumed = TrainingCurves()
    resumed.load_rank_state(callback.rank_state())
    resumed._add(torch.tensor(1.0), 1)
    assert resumed._total == 3e8 + 0.5 + 5 + 1
    assert resumed._count == 6


def test_a_point_waits_for_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = []
    monkeypatch.setattr(Tensor, "cpu", lambda own: waits.append(own.shape) or torch.tensor([1.0, 2.0]))
    values = {"loss": torch.zeros((), dtype=torch.float64, device="meta"), "norm": torch.zeros((), device="meta")}
    assert read_at_once(values) == {"loss": 1.0, "norm": 2.0}
    assert waits == [(2,)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that goes only when it is told to."""
    hand = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(curves, "time", SimpleNamespace(perf_counter=lambda: hand.now_s, time=time.time))
    return hand


class Timed(Plane):
    """A training step takes 1 s, a validation step 100 s."""

    def __init__(self, clock: SimpleNamespace) -> None:
        super().__init__()
        self.clock = clock

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.clock.now_s += 1
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.clock.now_s += 100
        self.log("val/loss", -self.clock.now_s)


@pytest.mark.parametrize("val_check_interval", [None, 2], ids=["validation_after_epochs", "validation_within"])
def test_samples_per_second_count_all_samples_and_the_time_of_training_alone(
    clock: SimpleNamespace, val_check_interval: int | None
) -> None:
    _, callback = fit(1, Timed(clock), val_check_interval=val_check_interval)
    assert callback.samples == 40
    assert callback.train_s == 14.0
    assert callback.samples_per_s == 40 / 14


@pytest.mark.parametrize("monitor", [None, "val/loss"])
def test_the_time_of_checkpoints_is_not_that_of_training(
    clock: SimpleNamespace, monitor: str | None, tmp_path: Any
) -> None:
    class Slow(ModelCheckpoint):
        saved = 0

        def _save_checkpoint(self, trainer: L.Trainer, filepath: str) -> None:
            clock.now_s += 1000
            Slow.saved += 1
            self._last_global_step_saved = trainer.global_step

    slow = Slow(tmp_path, monitor=monitor)
    _, callback = fit(1, Timed(clock), enable_checkpointing=True, callbacks=[slow], val_check_interval=2)
    assert Slow.saved > 0
    assert callback.train_s == 14.0


def test_there_is_no_throughput_before_training() -> None:
    assert TrainingCurves().samples_per_s is None


def test_the_end_of_the_first_step_is_noted() -> None:
    before = time.time()
    _, callback = fit(1)
    assert callback.first_step_at is not None
    assert before <= callback.first_step_at <= time.time()
