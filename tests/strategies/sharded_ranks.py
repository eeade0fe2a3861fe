"""What the ranks run in test_sharded.py; they import it by its name."""

import errno
import json
import os
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import Mock, patch

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchmetrics import SumMetric

from project.data.datamodule import DataModule, TensorDataset
from project.launch.quiet import quiet_libraries
from project.launch.rank import cluster_environment
from project.launch.run import Outcome, Run
from project.models import ImageClassifier, LanguageModel
from project.strategies import sharded_checkpoint
from project.strategies.checkpoint_files import CheckpointFiles
from project.strategies.sharded import ShardedStrategy
from project.strategies.sharded_checkpoint import consolidate_all, gathered, save_sharded
from project.tracking.curves import TrainingCurves
from project.training.checkpoint import ConfigInCheckpoint
from project.training.rank_states import RankStates
from project.training.saving import save

Config = dict[str, Any]
State = dict[str, Tensor]
NETS = {
    "mlp": {"_target_": "project.models.nets.MLP", "image_shape": [1, 4, 4], "num_classes": 10, "width": 8},
    "cnn": {"_target_": "project.models.nets.ResidualCNN", "image_shape": [1, 4, 4], "num_classes": 10, "width": 4},
    "gpt": {
        "_target_": "project.models.nets.GPT", "vocab_size": 10, "context": 8, "width": 8, "depth": 2, "heads": 2,
        "checkpoint_activations": True,
    },
}  # fmt: skip


class Data(DataModule):
    """40 samples to train on, 11 to validate and test: no number of ranks divides them."""

    def setup(self, stage: str) -> None:
        generator = torch.Generator().manual_seed(0)

        def dataset(length: int) -> TensorDataset:
            image = torch.randn(length, 1, 4, 4, generator=generator)
            tokens = torch.randint(10, (length, 9), generator=generator)
            return TensorDataset({"image": image, "label": tokens[:, 0], "tokens": tokens})

        self.train_set, self.val_set, self.test_set = dataset(40), dataset(11), dataset(11)


def run_cases(config: Config, run: Run) -> Outcome:
    """One function of this module after the other, each in a folder of its own: starting ranks takes longest."""
    for name, case in config["cases"].items():
        folder = run.folder / name
        folder.mkdir(exist_ok=True)
        outcome = globals()[case["function"]](config | case, replace(run, folder=folder))
        if run.rank == 0:
            (folder / "metrics.json").write_text(json.dumps(outcome.metrics))
    return Outcome({})


def build_trainer(config: Config, run: Run, callbacks: list[L.Callback], **more: Any) -> L.Trainer:
    quiet_libraries()
    strategy = config.get("strategy", "auto")
    arguments = {"precision": "64-true", "enable_checkpointing": False, "plugins": cluster_environment()}
    arguments |= config.get("trainer_arguments", {}) | more
    return L.Trainer(
        accelerator="cpu", devices=run.world_size, callbacks=callbacks,
        strategy=ShardedStrategy(**strategy) if isinstance(strategy, dict) else strategy,
        logger=False, enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False, **arguments,
    )  # fmt: skip


def build_model(config: Config, trainer: L.Trainer) -> L.LightningModule:
    L.seed_everything(config.get("seed", 0), verbose=False)
    net = NETS[config["net"]] | config.get("net_arguments", {})
    model = LanguageModel if config["net"] == "gpt" else ImageClassifier
    with trainer.precision_plugin.module_init_context():
        built = model(net=net, optimizer={"lr": 0.05, "foreach": True} | config["optimizer"])
    if config.get("compile"):
        built.net.compile(backend=config["compile"])
    return built


def save_weights(model: L.LightningModule, run: Run, name: str = "weights.pt") -> None:
    state = gathered(model.state_dict(), run.rank)
    if run.rank == 0:
        torch.save(state, run.folder / name)


def difference(left: State, right: State) -> float:
    return max(float((left[name] - right[name]).abs().max()) for name in left)


def train(config: Config, run: Run) -> Outcome:
    """Train, validate and test, all with the same trainer."""
    trainer = build_trainer(config, run, [TrainingCurves()], log_every_n_steps=1)
    model, data = build_model(config, trainer), Data(batch_size=config.get("batch_size", 8))
    trainer.fit(model, datamodule=data)
    metrics = dict(trainer.callback_metrics)
    trainer.test(model, datamodule=data, verbose=False)
    metrics |= trainer.callback_metrics
    trainer.validate(model, datamodule=data, verbose=False)
    kinds = {type(parameter) for parameter in model.parameters()}
    save_weights(model, run)
    facts = {"all_spread": float(kinds == {DTensor}), "first_with_its_data": 1.0}
    if isinstance(trainer.strategy, ShardedStrategy):
        facts["first_with_its_data"] = float(trainer.strategy.is_first_with_its_data)
    elements = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters())
    facts["share"] = elements / sum(p.numel() for p in model.parameters())
    (run.folder / f"facts_{run.rank}.json").write_text(json.dumps(facts))
    return Outcome({name: float(value) for name, value in metrics.items()})


def accumulate(config: Config, run: Run) -> Outcome:
    """The difference between batches of 8, and of 2 accumulated four times."""
    states: list[State] = []
    for batch_size, parts in ((8, 1), (2, 4)):
        trainer = build_trainer(config, run, [], accumulate_grad_batches=parts, max_epochs=2, limit_val_batches=0)
        model = build_model(config, trainer)
        trainer.fit(model, datamodule=Data(batch_size=batch_size))
        states.append(gathered(model.state_dict(), run.rank))
    return Outcome({"difference": difference(*states) if run.rank == 0 else 0.0})


def cycle(config: Config, run: Run) -> Outcome:
    """Save, test and resume, before and after the shards are made one file."""

    def fit(name: str, steps: int, resumed: Path | None = None) -> tuple[L.Trainer, L.LightningModule]:
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
        model = build_model(config, trainer)
        trainer.fit(model, datamodule=Data(batch_size=8), ckpt_path=resumed)
        return trainer, model

    def test() -> float:
        return trainer.test(model, datamodule=Data(batch_size=8), ckpt_path=best, verbose=False)[0]["test/loss"]

    _, model = fit("whole", 8)
    whole = gathered(model.state_dict(), run.rank)
    trainer, model = fit("half", 4)
    half = gathered(model.state_dict(), run.rank)
    best, last = run.folder / "half" / "best.ckpt", run.folder / "half" / "last.ckpt"
    facts = {"folders": float(best.is_dir() and last.is_dir()), "test_before": test()}
    _, resumed = fit("resumed_before", 8, last)
    before = gathered(resumed.state_dict(), run.rank)
    consolidate_all(trainer)
    facts["test_after"] = test()
    _, resumed = fit("resumed_after", 8, last)
    after = gathered(resumed.state_dict(), run.rank)
    if run.rank == 0:
        saved = torch.load(last, weights_only=True)["state_dict"]
        facts |= {"resumed_before": difference(whole, before), "resumed_after": difference(whole, after)}
        facts["saved"] = difference(half, saved)
        torch.save(whole, run.folder / "weights.pt")
    return Outcome(facts)


class SavesTwice(L.Callback):
    """Saves after step 2 at once, and in the background, where nothing is written before step 4."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.may_write = Event()
        self.went_on = False
        self._save = sharded_checkpoint.save

    def save(self, *args: Any, **kwargs: Any) -> None:
        assert self.may_write.wait(30)
        self._save(*args, **kwargs)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            self.may_write.set()
            assert save(trainer, self.folder / "at_once.ckpt")
            self.may_write.clear()
            assert save(trainer, self.folder / "meanwhile.ckpt", in_background=True)
        elif trainer.global_step == 4:
            self.went_on = not (self.folder / "meanwhile.ckpt").exists()
            self.may_write.set()


def background(config: Config, run: Run) -> Outcome:
    """Shards of one step, written at once and in the background; then errors of one rank, as all ranks know them."""
    files, saves = CheckpointFiles(), SavesTwice(run.folder)
    trainer = build_trainer(config, run, [saves], max_steps=4, plugins=[cluster_environment(), files])
    with patch.object(sharded_checkpoint, "save", saves.save):
        trainer.fit(build_model(config, trainer), datamodule=Data(batch_size=8))
    facts = {"complete": (run.folder / "meanwhile.ckpt").exists(), "went_on": saves.went_on}
    assert save(trainer, run.folder / "end.ckpt")
    right = sharded_checkpoint.checksum
    for name, error in {"raised": ValueError("a mistake"), "told": OSError(errno.ENOSPC, "No space left")}.items():
        wrong = Mock(side_effect=error)
        with patch.object(sharded_checkpoint, "checksum", wrong if run.rank == 1 else right):
            assert save(trainer, run.folder / "meanwhile.ckpt", in_background=True)
            try:
                facts[name] = not files.wait() and name == "told"
            except (ValueError, RuntimeError) as raised:
                facts[name] = name == "raised" and "a mistake" in str(raised)
    files.teardown()
    on_all = trainer.strategy.reduce_boolean_decision
    return Outcome({name: float(on_all(fact)) for name, fact in facts.items()})


def wait_for_the_dead(rank: int, folder: Path) -> None:
    """Of two ranks without a launcher, the second dies while the first's thread waits for it to write its shards."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    files, group = CheckpointFiles(), dist.new_group(backend="gloo")
    if rank == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    files.save(partial(save_sharded, group=group), ({}, {}), folder / "last.ckpt", {"in_background": True})
    try:
        files.teardown()
    finally:
        dist.destroy_process_group()


def resume(config: Config, run: Run) -> Outcome:
    """Go on from a checkpoint of another strategy."""
    trainer = build_trainer(config, run, [], max_steps=8, limit_val_batches=0)
    model = build_model(config, trainer)
    trainer.fit(model, datamodule=Data(batch_size=8), ckpt_path=config["ckpt_path"])
    save_weights(model, run)
    return Outcome({})


def evaluate(config: Config, run: Run) -> Outcome:
    """Test saved weights."""
    trainer = build_trainer(config, run, [])
    model = build_model(config, trainer)
    model.load_state_dict(torch.load(config["weights"]))
    return Outcome(trainer.test(model, datamodule=Data(batch_size=8), verbose=False)[0])


class Counting(L.LightningModule):
    """Counts the rows it sees, in two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(16, 4, bias=False)
        self.rows = SumMetric()

    @property
    def parallel_plan(self) -> Any:
        from project.models.plan import ParallelPlan

        return ParallelPlan(columns=("net",))

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.rows.update(len(batch["image"]))
        self.log("by_metric", self.rows)
        self.log("by_log", float(len(batch["image"])), reduce_fx="sum", sync_dist=True)


def count(config: Config, run: Run) -> Outcome:
    trainer = build_trainer(config, run, [])
    trainer.validate(Counting(), datamodule=Data(batch_size=8), verbose=False)
    facts = {name: float(value) for name, value in trainer.callback_metrics.items()}
    decide = trainer.strategy.reduce_boolean_decision
    facts |= {"all": float(decide(True)), "not_all": float(decide(run.rank == 0))}
    return Outcome(facts | {"any": float(decide(run.rank == 0, all=False))})


def drop(config: Config, run: Run) -> Outcome:
    """Each rank is seeded on its own; those of one tensor-parallel group must draw alike all the same."""
    trainer = build_trainer(config, run, [RankStates(0)], max_steps=5, limit_val_batches=0)
    model = build_model(config, trainer)
    trainer.fit(model, datamodule=Data(batch_size=8))
    drawn = [0.0] * run.world_size
    dist.all_gather_object(drawn, float(torch.rand(())))
    apart = 0.0
    for parameter in model.parameters():
        if isinstance(parameter, DTensor) and parameter.placements[-1].is_replicate():
            own = parameter.to_local().detach()
            first = own.clone()
            dist.broadcast(first, 0)
            apart = max(apart, float((own - first).abs().max()))
    sums = torch.tensor(apart)
    dist.all_reduce(sums, op=dist.ReduceOp.MAX)
    return Outcome({"apart": float(sums)} | {f"drawn_{rank}": value for rank, value in enumerate(drawn)})


def overflow(config: Config, run: Run) -> Outcome:
    """In the first step a gradient that tensor parallel splits overflows on the last rank alone, as in float16."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    plugins = [cluster_environment(), MixedPrecision("16-mixed", "cpu", scaler)]
    trainer = build_trainer(config, run, [], max_steps=1, limit_val_batches=0, precision=None, plugins=plugins)
    model = build_model(config, trainer)

    def overflown() -> None:
        split = next(p for p in model.parameters() if isinstance(p, DTensor) and p.placements[-1].is_shard())
        if run.rank == run.world_size - 1 and isinstance(split.grad, DTensor):
            split.grad.to_local().fill_(torch.inf)

    model.on_after_backward = overflown  # type: ignore[method-assign]
    trainer.fit(model, datamodule=Data(batch_size=8))
    scales = torch.zeros(run.world_size)
    scales[run.rank] = scaler.get_scale()
    dist.all_reduce(scales)
    return Outcome({f"scale_{rank}": float(scale) for rank, scale in enumerate(scales)})


class Own(L.LightningModule):
    """Shards itself, as Lightning's documentation shows."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(16, 10), nn.GELU(), nn.Linear(10, 10))
        self.is_sharded = False

    def configure_model(self) -> None:
        if not self.is_sharded:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])
            self.is_sharded = True

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch["image"]), batch["label"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def own(config: Config, run: Run) -> Outcome:
    from torch.distributed.fsdp import FSDPModule

    trainer = build_trainer(config, run, [], max_steps=2)
    model = Own()
    trainer.fit(model, datamodule=Data(batch_size=8))
    return Outcome({"sharded": float(sum(isinstance(part, FSDPModule) for part in model.modules()))})


def fail(config: Config, run: Run) -> Outcome:
    trainer = build_trainer(config, run, [], max_steps=1)
    trainer.fit(build_model(config, trainer), datamodule=Data(batch_size=8))
    return Outcome({})
