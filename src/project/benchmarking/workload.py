"""What all sides of a comparison train: the net, the batches, the optimizer and the schedule of one config."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from hydra.utils import instantiate
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from project.config.build import build
from project.data import DataModule, TensorDataset, TrainBatches
from project.errors import UserError


class RandomImages(DataModule):
    """Random images in memory: the fastest loader there is, behind which no loop can hide what it costs.

    Batch: `{"image": (B, C, H, W) float32, "label": (B,) int64}`.
    """

    def __init__(
        self, image_shape: Sequence[int], num_classes: int, length: int, val_length: int, **loading: Any
    ) -> None:
        super().__init__(**loading)
        self.image_shape = tuple(image_shape)
        self.num_classes = num_classes
        self.lengths = (length, val_length)

    def setup(self, stage: str | None = None) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        self.train_set, self.val_set = (
            TensorDataset(
                {
                    "image": torch.randn(length, *self.image_shape, generator=generator),
                    "label": torch.randint(self.num_classes, (length,), generator=generator),
                }
            )
            for length in self.lengths
        )


def build_net(config: dict[str, Any]) -> nn.Module:
    """The net with the initial weights that ``project.train`` gives it."""
    torch.manual_seed(config["seed"])
    net: nn.Module = instantiate(config["model"]["net"], _convert_="all")
    if config["model"].get("compile"):
        net.compile()
    return net


def build_data(config: dict[str, Any]) -> DataModule:
    datamodule = build(config, "data")
    if not isinstance(datamodule, DataModule):
        raise UserError(
            f"data._target_={config['data']['_target_']} is no project.data.DataModule, and the hand-written loop can "
            "share only those over ranks: type data=synthetic"
        )
    datamodule.setup("fit")
    return datamodule


def train_loader(config: dict[str, Any], rank: int = 0, world_size: int = 1) -> DataLoader[Any]:
    """The batches that ``project.train`` reads on this rank, from the same kind of loader."""
    datamodule = build_data(config)
    loader = datamodule.train_dataloader()
    if world_size == 1:
        return loader
    whole = loader.sampler
    assert isinstance(whole, TrainBatches)
    shared = TrainBatches(whole.length, datamodule.batch_size, rank, world_size, datamodule.seed, datamodule.shuffle)
    return DataLoader(
        loader.dataset,
        sampler=shared,
        batch_size=None,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


def build_optimizer(
    config: dict[str, Any], parameters: Iterable[nn.Parameter], steps: int
) -> tuple[Optimizer, LRScheduler | None]:
    """The optimizer, and the schedule that is advanced after every step, if there is one."""
    optimizer: Optimizer = instantiate(config["optimizer"], _partial_=True, _convert_="all")(params=list(parameters))
    if config.get("scheduler") is None:
        return optimizer, None
    arguments = {name: steps if value == "auto" else value for name, value in config["scheduler"].items()}
    if arguments.pop("interval", "epoch") != "step" or "monitor" in arguments:
        raise UserError(
            "the hand-written loop advances the learning rate at every step: type scheduler=one_cycle, "
            "scheduler=warmup_cosine or scheduler=none"
        )
    return optimizer, instantiate(arguments, _partial_=True, _convert_="all")(optimizer=optimizer)
