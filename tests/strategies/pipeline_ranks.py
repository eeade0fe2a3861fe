"""What the ranks run in test_pipeline.py; they import it by its name."""

import json
import random
from dataclasses import replace
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from sharded_ranks import NETS, Data, difference
from torch import Tensor, nn
from torchmetrics import MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from project.launch.quiet import quiet_libraries
from project.launch.rank import cluster_environment
from project.launch.run import Outcome, Run
from project.models import ImageClassifier, LanguageModel
from project.strategies.pipeline import PipelineStrategy
from project.strategies.weight_averaging import WeightAveraging
from project.tracking.curves import TrainingCurves
from project.training.checkpoint import ConfigInCheckpoint
from project.training.rank_states import RankStates

Config = dict[str, Any]
State = dict[str, Tensor]


def run_cases(config: Config, run: Run) -> Outcome:
    """One function of this module after the other, each in a folder of its own: starting ranks takes longest."""
    for name, case in config["cases"].items():
        folder = run.folder / name
        folder.mkdir(exist_ok=True)
        outcome = globals()[case["function"]](config | case, replace(run, folder=folder))
        if run.rank == 0:
            (folder / "metrics.json").write_text(json.dumps(outcome.metrics))
    return Outcome({})


def build_trainer(config: Config, run: Run, callbacks: list[L.Callback] | None = None, **more: Any) -> L.Trainer:
    quiet_libraries()
    strategy = PipelineStrategy(**config.get("strategy", {})) if run.world_size > 1 else "auto"
    arguments = {"precision": "64-true", "enable_checkpointing": False} | config.get("trainer_arguments", {}) | more
    return L.Trainer(
        accelerator="cpu", devices=run.world_size, callbacks=callbacks, plugins=cluster_environment(),
        strategy=strategy, logger=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, **arguments,
    )  # fmt: skip


def build_model(config: Config, trainer: L.Trainer) -> L.LightningModule:
    L.seed_everything(config.get("seed", 0), verbose=False)
    net = NETS[config["net"]] | config.get("net_arguments", {})
    model = LanguageModel if config["net"] == "gpt" else ImageClassifier
    with trainer.precision_plugin.module_init_context():
        return model(net=net, optimizer={"lr": 0.05} | config["optimizer"])


def save_weights(trainer: L.Trainer, run: Run, name: str = "weights.pt") -> State:
    """The whole model, on rank 0."""
    state = trainer.strategy.lightning_module_state_dict()
    if run.rank == 0:
        torch.save(state, run.folder / name)
    return state


def train(config: Config, run: Run) -> Outcome:
    """Train, validate and test, all with the same trainer."""
    callbacks = [TrainingCurves(), *([WeightAveraging(0.5)] if config.get("ema") else [])]
    trainer = build_trainer(config, run, callbacks, log_every_n_steps=1)
    model, data = build_model(config, trainer), Data(batch_size=config.get("batch_size", 8))
    trainer.fit(model, datamodule=data)
    metrics = dict(trainer.callback_metrics)
    trainer.test(model, datamodule=data, verbose=False)
    metrics |= trainer.callback_metrics
    trainer.validate(model, datamodule=data, verbose=False)
    save_weights(trainer, run)
    held = sum(p.numel() for p in model.parameters() if not p.is_meta)
    facts = {
        "share": held / sum(p.numel() for p in model.parameters()),
        "first_with_its_data": float(getattr(trainer.strategy, "is_first_with_its_data", True)),
        "metrics": {name: float(value) for name, value in metrics.items()},
    }
    (run.folder / f"facts_{run.rank}.json").write_text(json.dumps(facts))
    return Outcome(facts["metrics"])


def accumulate(config: Config, run: Run) -> Outcome:
    """The difference between batches of 16, and of 4 accumulated four times."""
    states: list[State] = []
    for batch_size, parts in ((16, 1), (4, 4)):
        trainer = build_trainer(config, run, accumulate_grad_batches=parts, max_epochs=2, limit_val_batches=0)
        trainer.fit(build_model(config, trainer), datamodule=Data(batch_size=batch_size))
        states.append(save_weights(trainer, run))
    return Outcome({"difference": difference(*states) if run.rank == 0 else 0.0})


def cycle(config: Config, run: Run) -> Outcome:
    """Save, test the best and resume from the last."""

    def fit(name: str, steps: int, resumed: str | None = None) -> L.Trainer:
        common = {"dirpath": run.folder / name, "enable_version_counter": False}
        callbacks = [
            ModelCheckpoint(filename="best", monitor="val/loss", **common),
            ModelCheckpoint(filename="last", every_n_train_steps=1, **common),
            ConfigInCheckpoint({"seed": 0}),
        ]
        trainer = build_trainer(
            config, run, callbacks, max_steps=steps, num_sanity_val_steps=0, val_check_interval=2,
            check_val_every_n_epoch=None, enable_checkpointing=True,
        )  # fmt: skip
        trainer.fit(build_model(config, trainer), datamodule=Data(batch_size=8), ckpt_path=resumed)
        return trainer

    whole = save_weights(fit("whole", 8), run)
    trainer = fit("half", 4)
    best = trainer.test(ckpt_path=str(run.folder / "half" / "best.ckpt"), datamodule=Data(batch_size=8), verbose=False)
    resumed = save_weights(fit("resumed", 8, str(run.folder / "half" / "last.ckpt")), run)
    facts = {"resumed": difference(whole, resumed), **best[0]} if run.rank == 0 else {}
    return Outcome(facts)


def resume(config: Config, run: Run) -> Outcome:
    """Go on from a checkpoint of another strategy."""
    trainer = build_trainer(config, run, max_steps=8, limit_val_batches=0)
    trainer.fit(build_model(config, trainer), datamodule=Data(batch_size=8), ckpt_path=config["ckpt_path"])
    save_weights(trainer, run)
    return Outcome({})


class Logging(L.LightningModule):
    """Logs values and metrics in training, by whatever micro-batch, and counts rows in validation."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 10))
        self.accuracy = MulticlassAccuracy(10, average="micro")
        self.pair = MetricCollection({"mean": MeanMetric(), "sum": SumMetric()})
        self.rows = SumMetric()
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        logits = self.net(batch["image"])
        loss = nn.functional.cross_entropy(logits, batch["label"])
        self.seen += len(logits)
        self.accuracy(logits, batch["label"])
        self.pair.update(loss)
        self.log("train/accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log("train/rows", float(len(logits)), reduce_fx="sum", on_step=False, on_epoch=True, sync_dist=True)
        self.log_dict({"train/logged_loss": loss}, on_step=False, on_epoch=True, sync_dist=True)
        return {"loss": loss, "logits": logits}

    def on_train_epoch_end(self) -> None:
        self.log("train/mean", self.pair["mean"].compute(), sync_dist=True)
        self.pair.reset()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.rows.update(len(self.net(batch["image"])))
        self.log("by_metric", self.rows)
        self.log("by_log", float(len(batch["image"])), reduce_fx="sum", sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def log(config: Config, run: Run) -> Outcome:
    L.seed_everything(0, verbose=False)
    trainer = build_trainer(config, run, max_epochs=2)
    model = Logging().double()
    trainer.fit(model, datamodule=Data(batch_size=8))
    facts = {name: float(value) for name, value in trainer.callback_metrics.items()}
    told: list[Any] = [facts] * run.world_size
    if run.world_size > 1:
        dist.all_gather_object(told, facts)
    decide = trainer.strategy.reduce_boolean_decision
    decisions = {"all": decide(True), "not_all": decide(run.rank == 0 and run.world_size > 1)}
    facts |= {"ranks_agree": float(all(other == facts for other in told))} | {k: float(v) for k, v in decisions.items()}
    state = trainer.strategy.lightning_module_state_dict()
    return Outcome(facts | {"seen": float(state["seen"])} if run.rank == 0 else facts)


class Noisy(L.LightningModule):
    """A net that returns its input, and a step that adds noise to it and expects to get the sum back."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        for layer in self.net:
            nn.init.eye_(layer.weight)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        x = batch["image"][:, 0, 0] + torch.rand(len(batch["image"]), 4) + random.random() + float(np.random.rand())
        drawn = torch.rand(())
        lost = (self.net(x) - x).abs().max()
        self.log("lost", lost.detach(), reduce_fx="max", on_step=False, on_epoch=True)
        self.log("least", drawn, reduce_fx="min", on_step=False, on_epoch=True)
        self.log("most", drawn, reduce_fx="max", on_step=False, on_epoch=True)
        return 0.0 * lost

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def draw(config: Config, run: Run) -> Outcome:
    trainer = build_trainer(config, run, [RankStates(0)], max_epochs=1)
    trainer.fit(Noisy().double(), datamodule=Data(batch_size=8))
    facts = {name: float(value) for name, value in trainer.callback_metrics.items()}
    drawn: list[float] = [0.0] * run.world_size
    dist.all_gather_object(drawn, float(torch.rand(())))
    return Outcome(facts | {f"drawn_{rank}": value for rank, value in enumerate(drawn)})


def evaluate(config: Config, run: Run) -> Outcome:
    """Test saved weights."""
    trainer = build_trainer(config, run)
    model = build_model(config, trainer)
    model.load_state_dict(torch.load(config["weights"]))
    return Outcome(trainer.test(model, datamodule=Data(batch_size=8), verbose=False)[0])


def fail(config: Config, run: Run) -> Outcome:
    trainer = build_trainer(config, run, max_epochs=1)
    trainer.fit(TwoCalls().double(), datamodule=Data(batch_size=8))
    return Outcome({})


class TwoCalls(Logging):
    """Only the last rank comes as far as the second call."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return (self.net(batch["image"]) + self.net(batch["image"])).mean()
