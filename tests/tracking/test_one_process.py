"""What the tracker makes of a training in one process, whatever Lightning does with it."""

import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.profilers import PassThroughProfiler, SimpleProfiler
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.utils.data import DataLoader

from project.strategies.data_parallel import DataParallelStrategy
from project.tracking.curves import TrainingCurves
from project.tracking.phase_profiler import PhaseProfiler
from project.tracking.tracker import Tracker
from project.tracking.windows import Window
from project.training.loops import install

BATCHES, BATCH_SIZE = 12, 8


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.net(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(module: L.LightningModule, tracker: Tracker | None = None, val_data: Any = None, **arguments: Any) -> Tracker:
    tracker = tracker or Tracker(interval_s=0.01)
    defaults: dict[str, Any] = {
        "accelerator": "cpu", "max_epochs": 2, "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False, "logger": False, "log_every_n_steps": 4, "num_sanity_val_steps": 0,
    }  # fmt: skip
    arguments["callbacks"] = [tracker, *arguments.pop("callbacks", [])]
    data: Any = DataLoader(torch.randn(BATCHES * BATCH_SIZE, 4), batch_size=BATCH_SIZE)  # type: ignore[arg-type]
    trainer = L.Trainer(**defaults | arguments)
    tracker.trainer = trainer  # type: ignore[attr-defined]
    if val_data is not None:
        install(trainer)
    trainer.fit(module, data, val_data or data)
    return tracker


def whole(tracker: Tracker) -> Window:
    assert tracker.ranks is not None
    return tracker.ranks.of_rank(0)


def test_all_steps_but_the_first_are_measured() -> None:
    window = whole(fit(Net()))
    assert window.steps == 2 * BATCHES - 1
    assert window.samples == window.steps * BATCH_SIZE


@pytest.mark.parametrize("how", ["not", "in_place", "wrapped"])
def test_the_diagnosis_knows_whether_the_net_is_compiled(how: str) -> None:
    model = Net()
    if how == "in_place":
        model.net.compile(backend="eager")
    elif how == "wrapped":
        model.net = torch.compile(model.net, backend="eager")
    assert fit(model, max_steps=1)._facts.compiled == (how != "not")


@pytest.mark.parametrize(
    ("limits", "steps"),
    [
        ({"max_epochs": 2}, 2 * BATCHES),
        ({"max_epochs": 2, "accumulate_grad_batches": 2}, BATCHES),
        ({"max_epochs": -1, "max_steps": 5}, 5),
        ({"max_epochs": -1, "max_time": "00:00:00:01"}, 0),  # whose end nobody knows
    ],
)
def test_the_diagnosis_knows_how_many_steps_the_run_takes(limits: dict[str, Any], steps: int) -> None:
    assert fit(Net(), **limits)._facts.run_steps == steps


class Manual(Net):
    """A GAN's way: two optimizers, each with a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = nn.Linear(4, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for net, optimizer in zip((self.net, self.other), self.optimizers(), strict=True):
            loss = net(batch).square().mean()
            loss.register_hook(lambda _: time.sleep(0.004))
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return [Slow(net.parameters(), lr=0.01) for net in (self.net, self.other)]


class Slow(torch.optim.SGD):
    def step(self, *args: Any, **kwargs: Any) -> Any:
        time.sleep(0.002)
        return super().step(*args, **kwargs)


def test_manual_optimization_has_its_phases() -> None:
    window = whole(fit(Manual()))
    assert 8 <= window.backward < 20
    assert 4 <= window.optimizer < 14
    assert window.forward < 6


def scalars(folder: Path, tag: str) -> list[float]:
    events = EventAccumulator(str(folder / "all"), size_guidance={"scalars": 0})
    events.Reload()
    return [point.value for point in events.Scalars(tag)]


@pytest.mark.parametrize("module", [Net, Manual])
def test_progress_reaches_its_end_with_the_training_also_with_several_optimizers(
    module: type[L.LightningModule], tmp_path: Path
) -> None:
    fit(module(), logger=TensorBoardLogger(str(tmp_path), name="", version=""), max_epochs=3)
    percents = scalars(tmp_path, "progress/percent")
    assert percents == sorted(percents)
    assert percents[0] < 40
    assert percents[-1] == pytest.approx(100)
    assert sum(percent == 100 for percent in percents) == 1


def test_what_validation_takes_is_no_training(tmp_path: Path) -> None:
    class Validates(Net):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            time.sleep(0.05)

    window = whole(fit(Validates(), logger=TensorBoardLogger(str(tmp_path), name="", version="")))
    assert window.wall_s < 0.4 * 2 * BATCHES * 0.05
    assert scalars(tmp_path, "progress/goodput_percent")[-1] < 50


def test_what_a_loader_takes_to_begin_a_validation_is_no_training() -> None:
    class Starts(DataLoader[Tensor]):
        def __iter__(self) -> Any:
            time.sleep(0.3)
            return super().__iter__()

    curves = TrainingCurves()
    tracker = fit(Net(), val_data=Starts(torch.randn(4, 4)), callbacks=[curves])  # type: ignore[arg-type]
    assert whole(tracker).wall_s < 0.3
    assert curves.train_s < 0.3


def test_a_model_that_knows_its_tokens_has_them_counted() -> None:
    class Reads(Net):
        def tokens_in(self, batch: Tensor) -> int:
            return batch.numel()

    window = whole(fit(Reads()))
    assert window.tokens == 4 * window.samples
    assert whole(fit(Net())).tokens != whole(fit(Net())).tokens  # NaN: not known


def test_the_replicas_of_dp_are_shown(tmp_path: Path) -> None:
    fit(
        Net(), strategy=DataParallelStrategy(), devices=2,
        logger=TensorBoardLogger(str(tmp_path), name="", version=""),
    )  # fmt: skip
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"all", "replica_000", "replica_001"}


class Fails(Callback):
    def on_train_batch_end(self, *args: Any, batch_idx: int = -1) -> None:
        if args[-1] == 9:
            raise RuntimeError("boom")


def test_after_an_error_the_trainer_is_as_it_was_and_what_was_measured_is_judged(tmp_path: Path) -> None:
    tracker = Tracker(interval_s=1e-6)
    with pytest.raises(RuntimeError, match="boom"):
        fit(Net(), tracker, callbacks=[Fails()], logger=TensorBoardLogger(str(tmp_path), name="", version=""))
    trainer = tracker.trainer  # type: ignore[attr-defined]
    assert isinstance(trainer.profiler, PassThroughProfiler)
    assert tracker.diagnosis is not None
    events = EventAccumulator(str(tmp_path / "all"))
    events.Reload()
    assert "diagnosis/text_summary" in events.Tags()["tensors"]


def test_the_users_profiler_works_beside_and_is_given_back() -> None:
    profiler = SimpleProfiler()
    tracker = fit(Net(), profiler=profiler)
    assert tracker.trainer.profiler is profiler  # type: ignore[attr-defined]
    assert any("training_step" in name for name in profiler.recorded_durations)


def test_one_tracker_measures_one_training_after_another() -> None:
    tracker = fit(Net())
    fit(Net(), tracker)
    assert whole(tracker).steps == 2 * BATCHES - 1
    assert not isinstance(tracker.trainer.profiler, PhaseProfiler)  # type: ignore[attr-defined]


def test_what_was_measured_does_not_grow_with_the_training() -> None:
    tracker = fit(Net(), max_epochs=6)
    assert tracker.ranks is not None
    assert tracker.ranks.rows.shape[0] == 1
    assert whole(tracker).steps == 6 * BATCHES - 1


def test_many_small_operations_are_counted_once_training_is_warm() -> None:
    class Many(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            out = self.net(batch)
            for _ in range(500):
                out = out * 1.0
            return out.mean()

    diagnosis = fit(Many()).diagnosis
    assert diagnosis is not None
    assert diagnosis.bound == "host"
    assert "operations a step take" in diagnosis.evidence


@pytest.mark.parametrize(("name", "value"), [("interval_s", 0), ("interval_s", -1), ("max_rank_series", 0)])
def test_bad_arguments_are_refused_with_what_to_type(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"type callbacks.tracker.{name}="):
        Tracker(**{name: value})
