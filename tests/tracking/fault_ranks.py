"""What the ranks run in test_tracker.py; they import it by its name."""

import time
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from project.data.datamodule import DataModule, TensorDataset
from project.launch.rank import cluster_environment, quiet_libraries
from project.launch.run import Outcome, Run
from project.strategies.sharded import ShardedStrategy
from project.tracking.tracker import Tracker

Config = dict[str, Any]
STEPS = 45


def judge_cases(config: Config, run: Run) -> Outcome:
    """Train once for each case on the same ranks: starting them takes longest. The verdicts come as text."""
    quiet_libraries()
    return Outcome({}, files={name: judge(case, run) for name, case in config["cases"].items()})


def judge(case: Config, run: Run) -> str:
    faulty = case.get("rank") in (None, run.rank)
    delay_s = case.get("delay_s", 0.04) if faulty else 0.0
    strategy: Any = ShardedStrategy() if case.get("strategy") == "fsdp" else "ddp" if run.world_size > 1 else "auto"
    module = Module(case, delay_s)
    tracker = Tracker(interval_s=0.3)
    trainer = L.Trainer(
        accelerator="cpu", devices=run.world_size, strategy=strategy, plugins=cluster_environment(),
        callbacks=[tracker], max_steps=STEPS, log_every_n_steps=10, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module, datamodule=Data(delay_s if case.get("in") == "data" else 0.0, case.get("batch_size", 64)))
    diagnosis = tracker.diagnosis
    assert diagnosis is not None
    for of_ranks in tracker.windows:
        for window in of_ranks:
            wall_ms = 1e3 * window.wall_s / window.steps
            assert abs(window.step - wall_ms) <= 0.05 * wall_ms, "the parts of a step are not its wall time"
    return f"{diagnosis.bound} {diagnosis.rank} {diagnosis.phase}: {diagnosis.evidence}"


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
        x = torch.randn(10 * self.batch_size, 32, generator=torch.Generator().manual_seed(0))
        self.train_set = SlowSet({"x": x}, self.delay_s)


class Module(L.LightningModule):
    """A net with a delay in one place."""

    def __init__(self, case: Config, delay_s: float) -> None:
        super().__init__()
        width = case.get("width", 256)
        norm = nn.BatchNorm1d(width) if case.get("batch_norm") else nn.Identity()
        self.net = nn.Sequential(nn.Linear(32, width), norm, nn.ReLU(), *_layers(case, width), nn.Linear(width, 1))
        self.place = case.get("in")
        self.delay_s = delay_s
        self.many_ops = case.get("many_ops", 0)

    def _delay(self, place: str) -> None:
        if self.place == place:
            time.sleep(self.delay_s)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        self._delay("transfer")
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._delay("other")

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self._delay("forward")
        out: Tensor = self.net(batch["x"])
        if out.requires_grad:
            out.register_hook(self._in_backward)
        return out.square().mean()

    def _in_backward(self, gradient: Tensor) -> Tensor:
        self._delay("backward")
        return gradient

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self._delay("optimizer")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


def _layers(case: Config, width: int) -> list[nn.Module]:
    return [nn.Linear(width, width) for _ in range(case.get("depth", 1))]
