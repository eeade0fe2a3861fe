"""A step does what Lightning's own loop does: the same hooks in the same order, the same weights and metrics."""

from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.optim import SGD
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau
from torch.utils.data import DataLoader

from project.errors import UserError
from project.training.loops import install
from small_classifier import Classifier, batches, loader, quiet_trainer

Noted = list[Any]
STEP_HOOKS = (
    "on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward",
    "on_before_optimizer_step", "on_train_batch_end",
)  # fmt: skip
EVALUATION_HOOKS = (
    "on_validation_batch_start", "on_validation_batch_end", "on_test_batch_start", "on_test_batch_end",
)  # fmt: skip
OF_BOTH = (*STEP_HOOKS, *EVALUATION_HOOKS, "on_validation_start", "on_train_epoch_end")
OF_MODULE = (
    "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer", "backward", "optimizer_step",
    "optimizer_zero_grad", "configure_gradient_clipping", "lr_scheduler_step",
)  # fmt: skip


def noting(base: type, names: tuple[str, ...]) -> type:
    """A subclass that notes each call of these hooks, what Lightning says is running, and the learning rate."""

    def hook(name: str) -> Callable[..., Any]:
        def call(self: Any, *arguments: Any, **more: Any) -> Any:
            module = arguments[1] if isinstance(self, Callback) else self
            trainer = module.trainer
            rate = trainer.optimizers[0].param_groups[0]["lr"] if trainer.optimizers else None
            step = (trainer.global_step, trainer.fit_loop.epoch_loop.batch_progress.total.ready, rate)
            self.noted.append((type(self).__name__, name, module._current_fx_name, step, batch_of(arguments)))
            if name in STEP_HOOKS and isinstance(self, L.LightningModule):
                self.log(f"in_{name}", float(len(self.noted)), on_step=True, on_epoch=True, batch_size=2)
            return getattr(base, name)(self, *arguments, **more)

        return call

    return type(f"Noting{base.__name__}", (base,), {name: hook(name) for name in names})


def batch_of(arguments: tuple[Any, ...]) -> int | None:
    return next((argument for argument in arguments if type(argument) is int), None)


class Plain(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.noted: Noted = []


class Scheduled(Plain):
    """Three schedules: of every other step, of the loss, and of the epochs."""

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = SGD(self.parameters(), lr=0.1)
        plateau = {"scheduler": ReduceLROnPlateau(optimizer, patience=0, threshold=10.0), "monitor": "train/loss"}
        return [optimizer], [
            {"scheduler": ExponentialLR(optimizer, 0.9), "interval": "step", "frequency": 2},
            plateau | {"interval": "step", "reduce_on_plateau": True},
            {"scheduler": ExponentialLR(optimizer, 0.5), "interval": "epoch"},
        ]


class Adversarial(Plain):
    """Two optimizers, stepped by the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        for optimizer in self.optimizers():
            loss = super().training_step(batch, batch_idx)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> list[SGD]:  # type: ignore[override]
        return [SGD(self.net[:4].parameters(), lr=0.1), SGD(self.net[4:].parameters(), lr=0.2)]  # type: ignore[index]


class Skipping(Plain):
    """Leaves out a step, returns a dictionary, and ends the epoch before its last batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 5 else None

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 2 else {"loss": loss, "more": batch_idx}


class SecondOrder(Plain):
    """An optimizer that runs the step several times."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class Fetching(Plain):
    def training_step(self, dataloader_iter: Iterator[Any]) -> Tensor:  # type: ignore[override]
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


class Batches(L.LightningDataModule):
    """Changes the batches on their way, and has one that is missing."""

    def __init__(self, sizes: list[int | None]) -> None:
        super().__init__()
        self.sizes = sizes

    def train_dataloader(self) -> DataLoader[Any]:
        whole = batches([size or 1 for size in self.sizes])
        there = [batch if size else None for batch, size in zip(whole, self.sizes, strict=True)]
        return DataLoader(there, batch_size=None)  # type: ignore[arg-type]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch if batch is None else batch | {"x": batch["x"] + 1}


class OwnBackward(SingleDeviceStrategy):
    def backward(self, closure_loss: Tensor, *arguments: Any, **more: Any) -> Tensor:
        return super().backward(3 * closure_loss, *arguments, **more)


def trained(model: Any, own_loops: bool, data: Any, val_data: Any = None, **arguments: Any) -> tuple[Any, ...]:
    torch.manual_seed(0)
    module = model() if isinstance(model, type) else model
    listening = noting(Callback, OF_BOTH)()
    listening.noted = module.noted
    trainer = quiet_trainer(1, arguments.pop("strategy", "auto"), callbacks=[listening], **arguments)
    if own_loops:
        install(trainer)
    trainer.fit(module, data, val_data)
    metrics = {name: float(value) for name, value in trainer.logged_metrics.items()}
    profiler: Any = trainer.profiler  # type: ignore[attr-defined]
    actions = {
        name.replace("[EpochLoop]", "[_TrainingEpochLoop]").replace("[EvaluationLoop]", "[_EvaluationLoop]"): len(times)
        for name, times in getattr(profiler, "recorded_durations", {}).items()
    }
    loop = trainer.fit_loop.epoch_loop
    return module, metrics, actions, loop.state_dict(), trainer.global_step


CASES: dict[str, tuple[type, dict[str, Any]]] = {
    "ordinary": (Plain, {}),
    "clipped": (Plain, {"gradient_clip_val": 0.1}),
    "clipped by value": (Plain, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "accumulated": (Plain, {"accumulate_grad_batches": 2}),
    "scheduled": (Scheduled, {"max_epochs": 2}),
    "validated within": (Scheduled, {"val_check_interval": 2}),
    "manual": (Adversarial, {}),
    "skipping": (Skipping, {}),
    "second order": (SecondOrder, {}),
    "fetching": (Fetching, {}),
    "half": (Plain, {"precision": "bf16-mixed"}),
    "single": (Plain, {"precision": "32-true"}),
    "own backward": (Plain, {"strategy": OwnBackward}),
    "profiled": (Plain, {"profiler": SimpleProfiler}),
    "stopped": (Plain, {"max_steps": 3}),
}


@pytest.mark.parametrize("everything", [False, True], ids=["few hooks", "all hooks"])
@pytest.mark.parametrize("case", CASES)
def test_a_step_is_as_in_lightnings_own_loop(case: str, everything: bool) -> None:
    model, arguments = CASES[case]
    model = noting(model, (*OF_BOTH, *OF_MODULE)) if everything else model
    dtype = torch.float64 if arguments.get("precision", "64-true") == "64-true" else torch.float32
    made = {"strategy": lambda: OwnBackward("cpu"), "profiler": SimpleProfiler}
    sides = [
        trained(
            model,
            own_loops,
            loader([4, 2, 3, 5, 2, 4, 1], dtype=dtype),
            loader([3, 5], dtype=dtype),
            **{key: made[key]() if key in made else value for key, value in arguments.items()},
        )
        for own_loops in (False, True)
    ]
    (theirs, *their_rest), (ours, *our_rest) = sides
    assert ours.noted == theirs.noted
    assert len(ours.noted) > 10
    assert our_rest == their_rest
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(own, other)


class WithoutLoss(Plain):
    """Forgets what to return, in all steps or all but one."""

    def __init__(self, but: int = -1) -> None:
        super().__init__()
        self.but = but

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss if batch_idx == self.but else None


def test_a_model_that_returns_no_loss_in_any_step_is_told_to() -> None:
    with pytest.raises(UserError, match=r"WithoutLoss.training_step returned None in each of the 3 steps .*return the"):
        trained(WithoutLoss(), True, Batches([4, 3, 5]))
    trained(WithoutLoss(but=1), True, Batches([4, 3, 5]))


def test_batches_that_a_data_module_changes_or_leaves_out_are_as_in_lightnings_own_loop() -> None:
    sides = [trained(Plain, own_loops, Batches([4, None, 3, 5])) for own_loops in (False, True)]
    (theirs, *their_rest), (ours, *our_rest) = sides
    assert len(ours.losses) == 3
    assert ours.losses == theirs.losses
    assert our_rest == their_rest


class Evaluated(Plain):
    """Logs in each batch and from a hook, and takes no index of the batch in its test."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        loss = self.net(batch["x"]).square().mean()
        self.log("batch/loss", loss, on_step=True, on_epoch=True, batch_size=len(batch["x"]))
        return loss

    def test_step(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:  # type: ignore[override]
        self.log("test/loss", self.net(batch["x"]).mean(), batch_size=len(batch["x"]))
        return {"loss": batch["x"].sum()}

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.noted.append(("ended", float(outputs), batch_idx, dataloader_idx))
        self.log("ended", float(batch_idx), batch_size=1)


class Notes(Logger):
    name, version = "notes", 0

    def __init__(self) -> None:
        self.noted: Noted = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.noted.append((step, metrics))

    def log_hyperparams(self, *_: Any, **__: Any) -> None: ...


@pytest.mark.parametrize("everything", [False, True], ids=["few hooks", "all hooks"])
@pytest.mark.parametrize(
    ("case", "arguments"),
    {
        "ordinary": {},
        "cut short": {"limit_val_batches": 2, "limit_test_batches": 1},
        "profiled": {"profiler": SimpleProfiler},
        "several loaders": {},
    }.items(),
)
def test_an_evaluation_is_as_in_lightnings_own_loop(case: str, arguments: dict[str, Any], everything: bool) -> None:
    sides: list[Any] = []
    for own_loops in (False, True):
        torch.manual_seed(0)
        module: Any = (noting(Evaluated, OF_MODULE[:3]) if everything else Evaluated)()
        listening = noting(Callback, EVALUATION_HOOKS)()
        listening.noted = module.noted
        notes = Notes()
        made = {key: value() if isinstance(value, type) else value for key, value in arguments.items()}
        trainer = quiet_trainer(1, "auto", callbacks=[listening], **made | {"logger": notes})
        if own_loops:
            install(trainer)
        loaders = [loader([3, 5, 1]), loader([2, 2], seed=1)] if case == "several loaders" else loader([3, 5, 1])
        validated = trainer.validate(module, loaders, verbose=False)
        tested = trainer.test(module, loader([4, 4]), verbose=False)
        profiler: Any = trainer.profiler  # type: ignore[attr-defined]
        actions = {
            name.replace("[EvaluationLoop]", "[_EvaluationLoop]"): len(times)
            for name, times in getattr(profiler, "recorded_durations", {}).items()
        }
        assert module.training
        sides.append((module.noted, notes.noted, validated, tested, actions))
    theirs, ours = sides
    assert ours == theirs
    assert len(ours[0]) > 6
    assert ours[1]
