"""Models and data as users write them, for tests with real ranks, which import them by name."""

import json
import multiprocessing
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.utils.data import DataLoader, IterableDataset

from comparison import largest_difference
from project.data.datamodule import DataModule
from project.launch.rank import cluster_environment
from project.launch.run import Outcome, Run
from project.models import ImageClassifier
from project.models.metrics import SampleMean
from project.models.nets import MLP
from project.models.plan import ParallelPlan
from project.strategies.data_parallel import DataParallelStrategy
from project.strategies.sharded import ShardedStrategy
from project.strategies.sharded_checkpoint import WEIGHTS, consolidate
from project.strategies.weight_averaging import WeightAveraging

Batch = dict[str, Any]


class Named(DataModule):
    """Digits of noise, each with a name: a batch is a dict with a list of strings in it."""

    class Samples(torch.utils.data.Dataset[Batch]):
        def __init__(self, length: int) -> None:
            generator = torch.Generator().manual_seed(length)
            self.images = torch.randn(length, 1, 8, 8, generator=generator)
            self.labels = torch.randint(10, (length,), generator=generator)

        def __len__(self) -> int:
            return len(self.images)

        def __getitem__(self, index: int) -> Batch:
            return {"name": f"number {index}", "image": self.images[index], "label": self.labels[index]}

    def setup(self, stage: str | None = None) -> None:
        self.train_set, self.val_set, self.test_set = self.Samples(256), self.Samples(51), self.Samples(52)


class Plain(L.LightningModule):
    """What the models below have in common."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.net: nn.Module = self.build_net(width)
        self.val_loss, self.test_loss = SampleMean(), SampleMean()

    def build_net(self, width: int) -> nn.Module:
        return MLP([1, 8, 8], 10, width)

    def losses(self, batch: Batch, batch_idx: int) -> Tensor:
        return cross_entropy(self.net(batch["image"]), batch["label"], reduction="none")

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return self.losses(batch, batch_idx).mean()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.val_loss.update(self.losses(batch, 0))
        self.log("val/loss", self.val_loss)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.test_loss.update(self.losses(batch, 0))
        self.log("test/loss", self.test_loss)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), 0.1, momentum=0.9, foreach=True)


class WithSpare(nn.Module):
    """A net with a second head, which only some steps use."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = MLP([1, 8, 8], 10, width)
        self.spare = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    def forward(self, image: Tensor, use_spare: bool) -> Tensor:
        logits: Tensor = self.body(image)
        return logits + self.spare(image) if use_spare else logits


class SometimesUnused(Plain):
    def build_net(self, width: int) -> nn.Module:
        return WithSpare(width)

    def losses(self, batch: Batch, batch_idx: int) -> Tensor:
        return cross_entropy(self.net(batch["image"], batch_idx % 2 == 0), batch["label"], reduction="none")


class OfDicts(nn.Module):
    """A net that takes a batch with strings as it is, and returns a dict."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = MLP([1, 8, 8], 10, width)

    def forward(self, batch: Batch) -> dict[str, Any]:
        logits = self.body(batch["image"])
        return {"logits": logits, "first": [logits[:, 0]], "name": batch["name"]}


class ReturnsDicts(Plain):
    """The net and the training step return dicts, the strings of the batch go through the net."""

    def __init__(self, width: int = 16) -> None:
        super().__init__(width)
        self.unused = nn.Flatten()

    def build_net(self, width: int) -> nn.Module:
        return OfDicts(width)

    def losses(self, batch: Batch, batch_idx: int) -> Tensor:
        output = self.net(batch)
        assert output["name"] == batch["name"]
        return cross_entropy(output["logits"], batch["label"], reduction="none") + output["first"][0] ** 2

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return {"loss": self.losses(batch, batch_idx).mean(), "name": batch["name"]}


class BuiltLate(Plain):
    """Builds its net in ``configure_model``, which Lightning calls for training and again for the test."""

    def build_net(self, width: int) -> nn.Module:
        self.width = width
        return nn.Identity()

    def configure_model(self) -> None:
        if isinstance(self.net, nn.Identity):
            self.net = MLP([1, 8, 8], 10, self.width)


class Discriminator(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.score = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.GELU(), nn.Linear(width, 1))

    @property
    def parallel_plan(self) -> ParallelPlan:
        return ParallelPlan(columns=("score.1",), rows=("score.3",))

    def forward(self, image: Tensor) -> Tensor:
        score: Tensor = self.score(image)
        return score


class Generator(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.draw = nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 64), nn.Unflatten(1, (1, 8, 8)))

    @property
    def parallel_plan(self) -> ParallelPlan:
        return ParallelPlan(columns=("draw.0",), rows=("draw.2",))

    def forward(self, code: Tensor) -> Tensor:
        image: Tensor = self.draw(code)
        return image


class Gan(Plain):
    """Two nets, two optimizers, stepped by hand, each with a schedule and clipped gradients."""

    def __init__(self, width: int = 16) -> None:
        super().__init__(width)
        self.automatic_optimization = False

    def build_net(self, width: int) -> nn.Module:
        return nn.ModuleDict({"generator": Generator(width), "discriminator": Discriminator(width)})

    def losses(self, batch: Batch, batch_idx: int) -> Tensor:
        real = self.net["discriminator"](batch["image"])
        return binary_cross_entropy_with_logits(real, torch.ones_like(real), reduction="none")

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        code = batch["image"][:, 0, 0]  # not random, so that runs can be compared
        of_generator, of_discriminator = self.optimizers()
        for optimizer, is_real in ((of_discriminator, False), (of_generator, True)):
            image = self.net["generator"](code)
            fake = self.net["discriminator"](image if is_real else image.detach())
            loss = binary_cross_entropy_with_logits(fake, torch.full_like(fake, float(is_real)))
            if not is_real:
                loss = loss + self.losses(batch, batch_idx).mean()
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.5)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        for schedule in self.lr_schedulers():
            schedule.step()

    def configure_optimizers(self) -> Any:
        optimizers = [torch.optim.SGD(net.parameters(), 0.1, foreach=True) for net in self.net.values()]
        return optimizers, [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9) for optimizer in optimizers]


class Compiled(ImageClassifier):
    """As ``model.compile=true``, without the minute that the kernels take."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.net.compile(backend="aot_eager")


class Dice(Named):
    """Each sample carries what an augmentation draws from each source of random numbers."""

    class Samples(Named.Samples):
        def __getitem__(self, index: int) -> Batch:
            drawn = [torch.rand(()).item(), np.random.rand(), random.random()]
            return super().__getitem__(index) | {"drawn": torch.tensor(drawn, dtype=torch.float64)}


class Gambler(Plain):
    """Notes what the data drew and what it draws itself, in each step of each rank."""

    def on_train_start(self) -> None:
        self.notes: list[dict[str, Any]] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        own = [torch.rand(()).item(), np.random.rand(), random.random()]
        note = {"epoch": self.current_epoch, "names": batch["name"], "data": batch["drawn"].flatten().tolist()}
        self.notes.append(note | {"step": own, "workers": multiprocessing.get_start_method()})
        return super().training_step(batch, batch_idx)

    def on_train_end(self) -> None:
        path = Path(self.trainer.default_root_dir) / f"notes_{self.global_rank}.json"
        path.write_text(json.dumps(self.notes))


class Endless(DataModule):
    """A stream of samples, which nobody can share out."""

    class Stream(IterableDataset[Batch]):
        def __iter__(self) -> Iterator[Batch]:
            return iter([{"image": torch.zeros(1, 8, 8), "label": torch.tensor(0)}] * 64)

    def setup(self, stage: str | None = None) -> None:
        self.train_set = self.val_set = self.test_set = self.Stream()  # type: ignore[assignment]


class PlainStream(L.LightningDataModule):
    """The same in a module that knows nothing of this project."""

    def train_dataloader(self) -> Any:
        return DataLoader(Endless.Stream(), batch_size=8)

    val_dataloader = test_dataloader = train_dataloader


class AloneInAMetric(Plain):
    """One rank computes a metric, which communicates, and the others do not."""

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_rank == 0:
            self.val_loss.update(torch.ones(1))
            self.val_loss.compute()


class Unsynchronised(Plain):
    """Each rank logs the loss of its own samples."""

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val/loss", self.losses(batch, 0).mean())
        self.log("val/agreed", 1.0, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val/loss"}}


STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp": lambda: "ddp",
    "dp": DataParallelStrategy,
    "fsdp": ShardedStrategy,
    "tensor_parallel": lambda: ShardedStrategy(tensor_parallel_size="auto"),
    "single_file": lambda: ShardedStrategy(save="single"),
}


def resume_averages(config: dict[str, Any], run: Run) -> Outcome:
    """The largest differences between an averaged run that was interrupted and one that was not, for each strategy."""
    facts: dict[str, float] = {}
    for name in config["strategies"]:

        def fit(
            steps: int, folder: Path, resumed: Path | None = None, strategy: Callable[[], Any] = STRATEGIES[name]
        ) -> L.LightningModule:
            L.seed_everything(0, verbose=False)
            last = ModelCheckpoint(folder, "last", every_n_train_steps=1, enable_version_counter=False)
            trainer = L.Trainer(
                accelerator="cpu", devices=run.world_size, strategy=strategy(), precision="64-true", max_steps=steps,
                callbacks=[WeightAveraging(decay=0.5), last], plugins=cluster_environment(), logger=False,
                enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
                limit_val_batches=0,
            )  # fmt: skip
            with trainer.precision_plugin.module_init_context():
                model = Plain(width=8)
            trainer.fit(model, datamodule=Named(batch_size=32), ckpt_path=resumed)
            return model

        folder = run.folder / name
        fit(6, folder / "whole")
        fit(3, folder / "half")
        fit(6, folder / "resumed", folder / "half" / "last.ckpt")
        dist.barrier() if dist.is_initialized() else None
        if run.rank == 0:
            for folder_of in ("whole", "resumed"):
                consolidate(folder / folder_of / "last.ckpt")
            whole, resumed = (torch.load(folder / n / "last.ckpt", weights_only=True) for n in ("whole", "resumed"))
            for key in WEIGHTS:
                facts[f"{name} {key}"] = largest_difference(whole[key], resumed[key])
            facts[f"{name} apart"] = largest_difference(whole[WEIGHTS[0]], whole[WEIGHTS[1]])
    return Outcome(facts)
