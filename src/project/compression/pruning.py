"""Lightning's pruning, in rounds on the way to a share of zeros, saved as plain weights and resumed exactly."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch.nn.utils import prune

from project.errors import UserError
from project.strategies.weight_averaging import WeightAveraging
from project.tracking.facts import progress_of

MASK, ORIGINAL = "_mask", "_orig"  # what torch.nn.utils.prune appends to the name of a weight
ROUNDING = 1e-9  # of shares
FUNCTIONS = ("l1_unstructured", "random_unstructured")
Place = tuple[nn.Module, str]


class Pruning(ModelPruning):
    """Sets weights of all layers together to zero, in rounds, and lets the others train on.

    After round k of n the share of zeros is ``amount`` (1 - (1 - k / n)^3): most go early, while there are many that
    do not matter (https://arxiv.org/abs/1710.01878). Pruned are matrices and kernels; biases, norms, embeddings and
    weights that several modules share are not. Checkpoints hold the weights as the net would have them without
    pruning, with their zeros.

    Args:
        amount: Share of these weights that are zero in the end.
        begin: Share of the training before the first round.
        end: Share of the training before the last round, if there are several.
        rounds: How many.
        pruning_fn: ``l1_unstructured`` takes the smallest in magnitude, ``random_unstructured`` any.

    Raises:
        UserError: an argument can't be, the strategy holds its weights otherwise, or training has no known end.
    """

    def __init__(
        self,
        amount: float = 0.5,
        begin: float = 0.2,
        end: float = 0.7,
        rounds: int = 10,
        pruning_fn: str = "l1_unstructured",
    ) -> None:
        if not 0 < amount < 1:
            raise UserError(f"callbacks.pruning.amount={amount} can't be: type a share between 0 and 1, as 0.5")
        if not 0 <= begin < end <= 1:
            raise UserError(
                f"callbacks.pruning.begin={begin} and callbacks.pruning.end={end} can't be: type shares from 0 to 1, "
                "the first the smaller, as callbacks.pruning.begin=0.2 callbacks.pruning.end=0.7"
            )
        if rounds < 1:
            raise UserError(f"callbacks.pruning.rounds={rounds} can't be: type a whole number from 1")
        if pruning_fn not in FUNCTIONS:
            raise UserError(f"callbacks.pruning.pruning_fn={pruning_fn} can't be: type one of {', '.join(FUNCTIONS)}")
        super().__init__(
            pruning_fn, parameter_names=["weight"], amount=amount, use_lottery_ticket_hypothesis=False,
            make_pruning_permanent=True,
        )  # fmt: skip
        self.begin = begin
        self.end = end
        self.rounds = rounds
        self._rounds_done = 0
        self._read: dict[str, Any] | None = None  # of a checkpoint

    def filter_parameters_to_prune(self, parameters_to_prune: Any = ()) -> list[Place]:
        owners = Counter(id(getattr(module, name)) for module, name in parameters_to_prune)
        return [
            (module, name)
            for module, name in parameters_to_prune
            if (weight := getattr(module, name)).ndim >= 2
            and owners[id(weight)] == 1
            and not isinstance(module, nn.Embedding)
        ]

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        check_weights_are_whole(trainer, "callbacks=pruning")
        if any(isinstance(callback, WeightAveraging) for callback in trainer.callbacks):  # type: ignore[attr-defined]
            raise UserError(
                "callbacks=pruning and an average of the weights can't be combined, since what is zero in some steps "
                "is not in their average: leave one of them out"
            )
        self._parameters_to_prune: list[Place] = []
        self._rounds_done = 0
        super().setup(trainer, pl_module, stage)
        if not self._parameters_to_prune:
            raise UserError(
                f"{type(pl_module).__name__} has no layer whose weights could be pruned: type callbacks=default"
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if math.isnan(progress_of(trainer).share()):
            raise UserError(
                "callbacks=pruning prunes at shares of the training, whose end is not known: type trainer.max_epochs=N "
                "or trainer.max_steps=N"
            )
        # Not before: the optimizer's states are kept in the order of the parameters, which masks change.
        if self._read is not None:
            self._rounds_done = self._read["rounds_done"]
            for (module, name), packed in zip(self._parameters_to_prune, self._read["masks"], strict=True):
                mask = _unpacked(packed, getattr(module, name))
                prune.custom_from_mask(module, name, mask)  # type: ignore[no-untyped-call]
            self._read = None

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if self._rounds_done == self.rounds:
            return
        share = (progress_of(trainer).share() - self.begin) / (self.end - self.begin)
        due = min(self.rounds, 1 + math.floor(share * (self.rounds - 1) + ROUNDING)) if share > -ROUNDING else 0
        if due > self._rounds_done:
            self._prune_to(float(self.amount) * (1 - (1 - due / self.rounds) ** 3))  # type: ignore[arg-type]
            self._rounds_done = due
            if trainer.world_size > 1:  # a tie, or a random choice, may have come out otherwise
                for module, name in self._parameters_to_prune:
                    dist.broadcast(getattr(module, name + MASK), src=0)
            step = trainer.fit_loop.epoch_loop._batches_that_stepped
            for logger in trainer.loggers:
                logger.log_metrics({"train/sparsity": self.sparsity()}, step)

    def on_train_epoch_end(self, *_: Any) -> None:
        """Nothing: Lightning would prune here."""

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        for weight in [name.removesuffix(ORIGINAL) for name in state if name.endswith(ORIGINAL)]:
            if weight + MASK in state:
                state[weight] = state.pop(weight + ORIGINAL) * state.pop(weight + MASK)

    def state_dict(self) -> dict[str, Any]:
        if not self._rounds_done or not self._is_masked():
            return {}
        masks = [_packed(getattr(module, name + MASK)) for module, name in self._parameters_to_prune]
        return {"rounds_done": self._rounds_done, "masks": masks}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._read = state_dict or None

    def sparsity(self) -> float:
        """Share of the weights that are set to zero, while they are pruned."""
        masks = [getattr(module, name + MASK, None) for module, name in self._parameters_to_prune]
        total: int = sum(getattr(module, name).numel() for module, name in self._parameters_to_prune)
        return sum(int((mask == 0).sum()) for mask in masks if mask is not None) / total

    def _is_masked(self) -> bool:
        return all(hasattr(module, name + MASK) for module, name in self._parameters_to_prune)

    def _prune_to(self, share: float) -> None:
        if self._is_masked():
            for module, name in self._parameters_to_prune:
                # It is as of the last forward pass, before the optimizer's step.
                setattr(module, name, getattr(module, name + ORIGINAL).detach() * getattr(module, name + MASK))
        total = sum(getattr(module, name).numel() for module, name in self._parameters_to_prune)
        self.apply_pruning(max(0, round((share - self.sparsity()) * total)))


def check_weights_are_whole(trainer: L.Trainer, what: str) -> None:
    """Check that each process holds the whole model, as one device's.

    Raises:
        UserError: the strategy spreads or copies it.
    """
    if not isinstance(trainer.strategy, DDPStrategy | SingleDeviceStrategy):
        raise UserError(
            f"{what} needs the whole model in each process, and {type(trainer.strategy).__name__} spreads or copies "
            "it: type trainer/strategy=ddp, or trainer.devices=1"
        )


def _packed(mask: Tensor) -> Tensor:
    """Eight entries in a byte."""
    return torch.from_numpy(np.packbits(mask.bool().cpu().numpy().ravel()))


def _unpacked(packed: Tensor, weight: Tensor) -> Tensor:
    bits = np.unpackbits(packed.cpu().numpy(), count=weight.numel())
    return torch.from_numpy(bits).reshape(weight.shape).to(weight)
