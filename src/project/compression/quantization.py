"""Evaluation and prediction with weights of eight bits, by torchao."""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from project.compression import KINDS
from project.compression.pruning import check_weights_are_whole
from project.errors import UserError
from project.notices import notice


class Quantization(Callback):
    """Quantizes linear layers once their trained weights are loaded, before a test, a validation or a prediction.

    Training, and what it saves, stays as it is. ``int8_weight_only`` keeps the weights in eight bits, one scale a row;
    ``int8_dynamic`` multiplies in eight bits too, with a scale for each sample's activations.

    Args:
        kind: One of the two.

    Raises:
        UserError: the kind is unknown, torchao is not installed, or the model can't be quantized.
    """

    def __init__(self, kind: str = "int8_dynamic") -> None:
        if kind not in KINDS:
            raise UserError(f"{kind} is no way to quantize: type one of {', '.join(KINDS)}")
        if importlib.util.find_spec("torchao") is None:
            raise UserError(
                f'{kind} needs the package torchao, which is not installed: type pip install "project[quantize]"'
            )
        self.kind = kind

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._quantize(trainer, pl_module)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.VALIDATING:
            self._quantize(trainer, pl_module)

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._quantize(trainer, pl_module)

    def _quantize(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        check_weights_are_whole(trainer, self.kind)
        number = quantize(module, self.kind)
        notice(f"{number} linear layers are quantized ({self.kind})")


def quantization(kind: str | None) -> list[Callback]:
    """The callback of a command's ``quantize=KIND``; none without."""
    return [] if kind is None else [Quantization(kind)]


def quantize(module: nn.Module, kind: str) -> int:
    """Quantize the linear layers of a model in place; their number.

    Raises:
        UserError: there are none.
    """
    logging.getLogger("torchao").setLevel(logging.ERROR)  # it warns of kernels for GPUs that are not here
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_
    from torchao.utils import should_reduce_range

    linear = [part for part in module.modules() if isinstance(part, nn.Linear)]
    if not linear:
        raise UserError(
            f"{type(module).__name__} has no linear layers, and others can't be quantized here: leave {kind} out"
        )
    # torchao would change settings of the compiler for the whole process.
    config: Any = (
        Int8WeightOnlyConfig(set_inductor_config=False)
        if kind == "int8_weight_only"
        else Int8DynamicActivationInt8WeightConfig(
            set_inductor_config=False, reduce_range=should_reduce_range(linear[0].weight.device)
        )
    )
    quantize_(module, config)
    return len(linear)
