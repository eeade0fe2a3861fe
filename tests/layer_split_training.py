"""Models trained by the strategy layer_split, and nets as it leaves them."""

from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from project.strategies.layer_split import LayerSplitStrategy, StagedForward
from project.strategies.stages import chain_of, split
from small_classifier import UNEVEN, loader, quiet_trainer


def fitted(
    model: L.LightningModule, devices: int, sizes: list[int] = UNEVEN, strategy: Any = None, **arguments: Any
) -> L.LightningModule:
    strategy = strategy or ("auto" if devices == 1 else LayerSplitStrategy())
    quiet_trainer(devices, strategy, **arguments).fit(model, loader(sizes))
    return model


def staged(net: nn.Module, devices: Sequence[torch.device], micro_batches: int = 1) -> nn.Module:
    """The net as the strategy leaves it during a run."""
    stages = split(chain_of(net), len(devices))
    for device, stage in zip(devices, stages, strict=True):
        for _, part in stage:
            part.to(device)
    net.__dict__["forward"] = StagedForward(net, "net", stages, devices, micro_batches)
    return net


class Structured(nn.Module):
    def forward(self, x: Tensor, *, scale: Tensor) -> dict[str, Tensor]:
        return {"x": x * scale, "scale": scale}


class Summed(nn.Module):
    def forward(self, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return given["x"] + 1, given["x"] * given["scale"]


def connected(model: L.LightningModule, devices: list[torch.device], **arguments: Any) -> LayerSplitStrategy:
    strategy = LayerSplitStrategy(parallel_devices=devices, **arguments)
    strategy.connect(model)
    return strategy


def places(model: nn.Module) -> dict[str, str]:
    return {name: tensor.device.type for name, tensor in model.state_dict().items()}
