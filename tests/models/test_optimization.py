"""Optimizers and schedules from plain config."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.utils.data import DataLoader

from project.models.optimization import _keep_kernel, configure, warmup_cosine

ADAMW = {"_target_": "torch.optim.AdamW", "lr": 0.1, "betas": [0.8, 0.9]}


QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "max_epochs": 2,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Line(L.LightningModule):
    """Fits a line with the given schedule and notes the learning rate of each step."""

    def __init__(self, scheduler: dict[str, Any] | None) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.scheduler = scheduler
        self.rates: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return self.layer(batch[:, None]).square().mean()  # type: ignore[no-any-return]

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val/loss", 1.0)

    def configure_optimizers(self) -> Any:
        return configure(self, {"_target_": "torch.optim.SGD", "lr": 0.1}, self.scheduler)


def rates(folder: Path, scheduler: dict[str, Any] | None, **arguments: Any) -> list[float]:
    """Learning rates of 2 epochs of 5 steps."""
    model = Line(scheduler)
    trainer = L.Trainer(**QUIET | {"default_root_dir": folder} | arguments)
    data: DataLoader[Tensor] = DataLoader(torch.randn(10), batch_size=2)  # type: ignore[arg-type]
    trainer.fit(model, data, data)
    return model.rates


def test_optimizer_gets_the_trainable_parameters_themselves() -> None:
    module = Line(None)
    module.layer.bias.requires_grad = False
    optimizer = configure(module, ADAMW)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert [id(parameter) for parameter in optimizer.param_groups[0]["params"]] == [id(module.layer.weight)]
    assert tuple(optimizer.defaults["betas"]) == (0.8, 0.9)


@pytest.mark.parametrize(
    ("interval", "expected"),
    [("step", [0.1 * (1 - step / 10) for step in range(10)]), ("epoch", [0.1] * 5 + [0.05] * 5)],
)
def test_auto_is_the_length_of_the_run_in_units_of_the_interval(
    tmp_path: Path, interval: str, expected: list[float]
) -> None:
    linear = {
        "_target_": "torch.optim.lr_scheduler.LinearLR",
        "start_factor": 1.0,
        "end_factor": 0.0,
        "total_iters": "auto",
        "interval": interval,
    }
    assert rates(tmp_path, linear) == pytest.approx(expected)


def test_auto_counts_optimizer_steps_not_batches(tmp_path: Path) -> None:
    linear = {
        "_target_": "torch.optim.lr_scheduler.LinearLR",
        "start_factor": 1.0,
        "end_factor": 0.0,
        "total_iters": "auto",
        "interval": "step",
    }
    # Each epoch's 5 batches make 3 steps; the rate is noted per batch.
    observed = rates(tmp_path, linear, accumulate_grad_batches=2)
    assert observed[-1] == pytest.approx(0.1 * (1 - 5 / 6))


def test_one_cycle_ends_near_zero(tmp_path: Path) -> None:
    cycle = {
        "_target_": "torch.optim.lr_scheduler.OneCycleLR",
        "max_lr": 0.1,
        "total_steps": "auto",
        "interval": "step",
    }
    observed = rates(tmp_path, cycle)
    assert max(observed) == pytest.approx(0.1)
    assert observed[-1] < 1e-5


def test_plateau_follows_the_monitored_metric(tmp_path: Path) -> None:
    plateau = {
        "_target_": "torch.optim.lr_scheduler.ReduceLROnPlateau",
        "factor": 0.5,
        "patience": 0,
        "monitor": "val/loss",
    }
    assert rates(tmp_path, plateau, max_epochs=3)[::5] == pytest.approx([0.1, 0.1, 0.05])


def test_warm_up_rises_to_the_peak_and_the_cosine_falls_to_zero() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = warmup_cosine(optimizer, warmup_steps=0.4, total_steps=10)
    observed = []
    for _ in range(11):
        observed.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert observed[:5] == pytest.approx([0.02, 0.04, 0.06, 0.08, 0.1])
    assert observed[7] == pytest.approx(0.05)
    assert observed[10] == pytest.approx(0)
    assert observed[4:] == sorted(observed[4:], reverse=True)


@pytest.mark.parametrize("warmup_steps", [10, 1.0, -1])
def test_warm_up_that_takes_the_whole_run_is_refused(warmup_steps: float) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(ValueError, match="must leave some of the 10 steps"):
        warmup_cosine(optimizer, warmup_steps, total_steps=10)


def test_auto_is_refused_for_a_run_without_an_end(tmp_path: Path) -> None:
    cosine = {"_target_": "torch.optim.lr_scheduler.CosineAnnealingLR", "T_max": "auto"}
    with pytest.raises(ValueError, match=r"scheduler.T_max=auto .* type trainer.max_epochs=20"):
        rates(tmp_path, cosine, max_epochs=-1)


def test_auto_is_refused_for_a_run_without_a_batch(tmp_path: Path) -> None:
    cosine = {"_target_": "torch.optim.lr_scheduler.CosineAnnealingLR", "T_max": "auto"}
    with pytest.raises(ValueError, match=r"^trainer\.limit_train_batches=0 leaves no batch to train on: type 1"):
        rates(tmp_path, cosine, limit_train_batches=0)


def test_unknown_interval_is_refused() -> None:
    with pytest.raises(ValueError, match=r"scheduler.interval=batch is unknown"):
        configure(Line(None), ADAMW, {"_target_": "torch.optim.lr_scheduler.LinearLR", "interval": "batch"})


@pytest.mark.parametrize(
    ("optimizer", "fused"),
    [
        ({"_target_": "torch.optim.AdamW"}, True),
        ({"_target_": "torch.optim.SGD", "lr": 0.1}, True),
        ({"_target_": "torch.optim.SGD", "lr": 0.1, "fused": False}, False),
        ({"_target_": "torch.optim.SGD", "lr": 0.1, "foreach": True}, None),
        ({"_target_": "torch.optim.LBFGS"}, None),
    ],
)
def test_optimizers_are_fused_where_they_can_be_and_nobody_says_otherwise(
    optimizer: dict[str, Any], fused: bool | None
) -> None:
    built = configure(Line(None), optimizer)
    assert isinstance(built, torch.optim.Optimizer)
    assert built.param_groups[0].get("fused") is fused


@pytest.mark.parametrize("what", ["sparse", "complex", "meta"])
def test_parameters_that_no_kernel_updates_are_updated_one_by_one(what: str) -> None:
    model = Line(None)
    if what == "sparse":
        model.more = nn.Embedding(3, 2, sparse=True)
    elif what == "complex":
        model.more = nn.Linear(2, 2, dtype=torch.complex64)
    else:
        model.more = nn.Linear(2, 2, device="meta")
    built = configure(model, {"_target_": "torch.optim.SGD", "lr": 0.1})
    assert isinstance(built, torch.optim.Optimizer)
    assert built.param_groups[0]["fused"] is None


def test_a_checkpoint_does_not_decide_whether_the_optimizer_is_fused() -> None:
    kinds = [configure(Line(None), ADAMW | more) for more in ({}, {"fused": False})]
    for saved, loads, own in ((kinds[0], kinds[1], False), (kinds[1], kinds[0], True)):
        assert isinstance(saved, torch.optim.Optimizer)
        assert isinstance(loads, torch.optim.Optimizer)
        loads.load_state_dict(saved.state_dict())
        assert loads.param_groups[0]["fused"] is own
        loads.param_groups[0]["params"][0].grad = torch.ones(1, 1)
        loads.step()


@pytest.mark.parametrize(("is_fused", "place"), [(True, "meta"), (False, "cpu")])
def test_steps_are_counted_where_the_kernel_reads_them_whoever_wrote_the_checkpoint(is_fused: bool, place: str) -> None:
    """As on CUDA, whose place the meta device takes."""
    own = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2, device="meta"))])
    _keep_kernel(own)
    own.defaults["fused"] = is_fused
    of_other = {"step": torch.tensor(3.0), "exp_avg": torch.zeros(2), "exp_avg_sq": torch.zeros(2)}
    group = own.state_dict()["param_groups"][0] | {"fused": not is_fused}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "cpu", lambda _: torch.tensor(3.0))  # a meta tensor can't be read
        own.load_state_dict({"state": {0: of_other}, "param_groups": [group]})
    (state,) = own.state.values()
    assert state["step"].device.type == place


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_gradients_are_clipped_in_every_precision_by_fused_optimizers_too(tmp_path: Path, precision: Any) -> None:
    norms: list[float] = []

    class Norms(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
            norms.append(get_total_norm([p.grad for p in pl_module.parameters() if p.grad is not None]).item())
            assert trainer.optimizers[0].param_groups[0]["fused"]

    assert len(rates(tmp_path, None, precision=precision, gradient_clip_val=1e-3, callbacks=[Norms()])) == 10
    assert norms == pytest.approx([1e-3] * 10, rel=0.02)


def test_a_scaler_unscales_before_gradients_are_clipped(tmp_path: Path) -> None:
    fused: list[bool] = []

    class Notes(L.Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            fused.append(bool(trainer.optimizers[0].param_groups[0]["fused"]))

    scaling = MixedPrecision("16-mixed", "cpu")  # by name Lightning takes it on CUDA alone
    assert len(rates(tmp_path, None, plugins=[scaling], gradient_clip_val=0.5, callbacks=[Notes()])) == 10
    assert fused == [False]


ONE_CYCLE = {"_target_": "torch.optim.lr_scheduler.OneCycleLR", "max_lr": 0.1, "total_steps": 10}


@pytest.mark.parametrize(("name", "cycles"), [("Adagrad", False), ("LBFGS", False), ("SGD", True), ("AdamW", True)])
def test_momentum_is_cycled_where_there_is_some(name: str, cycles: bool) -> None:
    built: Any = configure(Line(None), {"_target_": f"torch.optim.{name}", "lr": 0.1}, ONE_CYCLE)
    assert built["lr_scheduler"]["scheduler"].cycle_momentum == cycles


@pytest.mark.parametrize(
    ("optimizer", "scheduler", "sentence"),
    [
        (
            {"_target_": "torch.optim.Muon"},
            None,
            r"^optimizer\._target_=torch\.optim\.Muon can't be built \(.*type op",
        ),
        ({"_target_": "torch.optim.SGD", "betas": [0, 0]}, None, r"can't be built \(.*betas.*type optimizer=adamw"),
        (ADAMW, ONE_CYCLE | {"pct_start": 3.0}, r"^scheduler\._target_=.*pct_start.*type scheduler=none"),
    ],
    ids=["parameters", "arguments", "schedule"],
)
def test_what_a_class_refuses_is_told_in_a_sentence(optimizer: Any, scheduler: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        configure(Line(None), optimizer, scheduler)
