"""What the ranks run in test_tracker.py; they import it by its name."""

import time
from contextlib import ExitStack
from typing import Any
from unittest import mock

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from project.data.datamodule import DataModule, TensorDataset
from project.launch.quiet import quiet_libraries
from project.launch.rank import cluster_environment
from project.launch.run import Outcome, Run
from project.models.nets.mlp import MLP
from project.strategies.sharded import ShardedStrategy
from project.tracking import tracker as tracker_module
from project.tracking.arrivals import Arrivals
from project.tracking.tracker import Tracker

Config = dict[str, Any]
STEPS = 17


def judge_cases(config: Config, run: Run) -> Outcome:
    """Train for each case on the same ranks: starting them takes longest. The verdicts come as text.

    A second time where the verdict is not as expected: a rank from which others on this machine take its core for all
    of a case is a straggler indeed.
    """
    quiet_libraries()
    verdicts = {}
    for name, (expected, case) in config["cases"].items():
        verdicts[name] = judge(case, run)
        again = [not verdicts[name].startswith(expected)]
        if run.world_size > 1:
            dist.broadcast_object_list(again, src=0)
        if again[0]:
            verdicts[name] = judge(case, run)
    return Outcome({}, files=verdicts)


def judge(case: Config, run: Run) -> str:
    faulty = case.get("rank") in (None, run.rank)
    delay_s = case.get("delay_s", 0.04) if faulty else 0.0
    tracker, stopwatch = Tracker(interval_s=0.3), Stopwatch()
    trainer = L.Trainer(
        accelerator="cpu", devices=run.world_size, strategy=strategy_of(case, run), plugins=cluster_environment(),
        callbacks=[stopwatch, tracker], max_steps=case.get("steps", STEPS), log_every_n_steps=8, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, accumulate_grad_batches=case.get("accumulate", 1), num_sanity_val_steps=0,
        val_check_interval=5 if case.get("in") == "validation" else None,
    )  # fmt: skip
    module = Manual(case, delay_s) if case.get("manual") else Module(case, delay_s)
    data = Data(delay_s if case.get("in") == "data" else 0.0, case.get("batch_size", 96))
    with ExitStack() as patches:
        if not case.get("broadcast"):
            # The collective that Lightning runs before each batch: who is late must be known without it.
            patches.enter_context(mock.patch.object(_TrainingEpochLoop, "_broadcast_sigterm_tensor"))
        if not case.get("recorder", True):
            patches.enter_context(mock.patch.object(tracker_module, "arrivals", return_value=Arrivals()))
        trainer.fit(module, datamodule=data)
    if run.rank:
        return ""
    diagnosis = tracker.diagnosis
    assert diagnosis is not None
    assert tracker.ranks is not None
    assert len(tracker.ranks) == run.world_size
    sure = "" if diagnosis.is_sure else "likely "
    measured_s = float(1e-3 * (tracker.ranks.step() * tracker.ranks["steps"])[0])
    if case.get("in") != "validation" and abs(measured_s - stopwatch.seconds) > 0.05 * stopwatch.seconds:
        sure = f"the parts sum to {measured_s} s of {stopwatch.seconds} s; "
    late = [round(value, 1) for value in tracker.ranks["late"].tolist()]
    return f"{sure}{diagnosis.bound} {diagnosis.rank} {diagnosis.phase}: {diagnosis.evidence}; late {late}"


def strategy_of(case: Config, run: Run) -> Any:
    if run.world_size == 1:
        return "auto"
    if case.get("strategy") in ("fsdp", "fsdp_tensor_parallel"):
        return ShardedStrategy(tensor_parallel_size=1 if case["strategy"] == "fsdp" else 2)
    return DDPStrategy(bucket_cap_mb=case.get("bucket_mb", 25))


class Stopwatch(Callback):
    """The wall time of all steps but the first, as a user would take it."""

    def on_train_batch_end(self, *_: Any) -> None:
        if not hasattr(self, "_since"):
            self._since = time.perf_counter()

    def on_train_end(self, *_: Any) -> None:
        self.seconds = time.perf_counter() - self._since


class SlowSet(TensorDataset):
    def __init__(self, fields: dict[str, Tensor], delay_s: float) -> None:
        super().__init__(fields)
        self.delay_s = delay_s

    def __getitems__(self, indices: Any) -> Any:
        time.sleep(self.delay_s)
        return super().__getitems__(indices)


class Data(DataModule):
    def __init__(self, delay_s: float, batch_size: int) -> None:
        super().__init__(batch_size=batch_size)
        self.delay_s = delay_s

    def setup(self, stage: str) -> None:
        x = torch.randn(4 * STEPS * self.batch_size, 32, generator=torch.Generator().manual_seed(0))
        self.train_set = SlowSet({"x": x}, self.delay_s)
        self.val_set = TensorDataset({"x": x[: 2 * self.batch_size]})


class Module(L.LightningModule):
    """A net with a delay in one place."""

    def __init__(self, case: Config, delay_s: float) -> None:
        super().__init__()
        width = case.get("width", 256)
        norm = nn.BatchNorm1d(width) if case.get("batch_norm") else nn.Identity()
        self.net: nn.Module = nn.Sequential(
            nn.Linear(32, width), norm, nn.ReLU(), *_layers(case, width), nn.Linear(width, 1)
        )
        if case.get("strategy") == "fsdp_tensor_parallel":
            self.net = MLP((32,), 1, width, depth=1)  # a net with a plan
        self.place = case.get("in")
        self.delay_s = delay_s
        self.equal_s = case.get("equal_s", 0.0)  # of all ranks
        self.many_ops = case.get("many_ops", 0)

    def _delay(self, place: str) -> None:
        if self.place == place:
            time.sleep(self.delay_s)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        self._delay("transfer")
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._delay("other")

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        time.sleep(self.equal_s)
        self._delay("forward")
        out: Tensor = self.net(batch["x"])
        if out.requires_grad:
            out.register_hook(self._in_backward)
        for _ in range(self.many_ops):
            out = out * 1.0
        return out.square().mean()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._delay("validation")

    def _in_backward(self, gradient: Tensor) -> Tensor:
        self._delay("backward")
        return gradient

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self._delay("optimizer")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class Manual(Module):
    """The same, with the optimizer in the user's hands."""

    def __init__(self, case: Config, delay_s: float) -> None:
        super().__init__(case, delay_s)
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(batch))
        optimizer.step(closure=lambda: self._delay("optimizer"))
        optimizer.zero_grad()


def _layers(case: Config, width: int) -> list[nn.Module]:
    return [nn.Linear(width, width) for _ in range(case.get("depth", 1))]
