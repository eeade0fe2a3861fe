"""As few CPU threads as a step is worth."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from project.batch import batch_length
from project.compiled import is_compiled
from project.cpu import threads_given

# Two threads meet at the end of every operation, and where either is late (another process, a checkpoint's writer) the
# other waits. Beside other work on two cores, steps of the digits' MLP (33 MFLOP) took 1.3 to 2.7 ms on average with
# one thread, and 27 to 54 ms with two that spin; at best, 0.96 and 1.06 ms. A loop by hand took 0.54 and 0.44 ms at
# best, and 1.6 and 1.2 ms at 116 MFLOP.
FLOP_A_THREAD = 40e6  # of a step
BACKWARD = 2  # times as much as forward
COUNTED = 0.9  # of the parameters, below which what the model computes is not known


def of_step(flop: float, most: int) -> int:
    """Threads for a step of so many floating-point operations, from 1 to ``most``."""
    return min(most, max(1, round(flop / FLOP_A_THREAD)))


class StepThreads(Callback):
    """Trains small steps on fewer CPU threads than the rank was given, where the config leaves their number open.

    Matrix products and convolutions are counted in the sanity check: twice a weight's elements for each row, or
    position, of the output. It must be a matter of the model alone, not of a measurement, and a run that goes on keeps
    it: sums come out with other last bits on another number of threads.

    Args:
        threads_per_rank: ``launch.threads_per_rank``.
    """

    def __init__(self, threads_per_rank: int | str) -> None:
        self._is_open = threads_per_rank == "auto" and threads_given("OMP_NUM_THREADS") is None
        self._flop: float | None = None  # of a step
        self._forward: _Forward | None = None
        self._before = 0

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # A compiled model would be compiled anew for the hook, and replicas in one process don't share threads so.
        is_alone = trainer.num_devices == 1 or trainer.world_size > 1
        if self._adapts(trainer) and is_alone and not any(map(is_compiled, pl_module.modules())):
            self._forward = _Forward(pl_module)

    def _adapts(self, trainer: L.Trainer) -> bool:
        return self._is_open and trainer.strategy.root_device.type == "cpu"

    def on_validation_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, *_: Any) -> None:
        if self._forward is not None:
            self._forward.samples += batch_length(batch) or 0

    def on_sanity_check_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._forward is not None:
            self._forward.end()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._flop is not None:  # a run that goes on, maybe with a validation
            self._take(trainer)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, *_: Any) -> None:
        if self._before or not self._adapts(trainer):
            return
        if self._flop is None:
            own = self._forward.of_step(pl_module, batch_length(batch) or 0) if self._forward is not None else None
            # One for all ranks, whose samples may differ in size: a checkpoint holds one.
            self._flop = trainer.strategy.broadcast(own) if trainer.world_size > 1 else own
        self._take(trainer)

    def _take(self, trainer: L.Trainer) -> None:
        self._before = torch.get_num_threads()
        if self._flop is not None and self._adapts(trainer):
            torch.set_num_threads(of_step(self._flop, self._before))

    def on_train_end(self, *_: Any) -> None:
        self._restore()

    def on_exception(self, *_: Any) -> None:
        if self._forward is not None:
            self._forward.end()
        self._restore()

    def _restore(self) -> None:
        """The test computes as ``evaluate`` does, and a notebook's process is as it was."""
        if self._before:
            torch.set_num_threads(self._before)
        self._before = 0

    def state_dict(self) -> dict[str, Any]:
        return {"flop": self._flop}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._flop = state_dict["flop"]


class _Forward:
    """Counts what a model's modules compute, from now until its ``end``."""

    def __init__(self, model: nn.Module) -> None:
        self.samples = 0
        self._flop = 0.0
        self._counted: dict[int, int] = {}  # elements of the parameters that had a part
        # Not one for all modules, of which torch.compile warns.
        self._handles = [module.register_forward_hook(self._add) for module in model.modules()]

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _add(self, module: nn.Module, _: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return  # a net that is compiled aside, where it is no module of the model, stays in one piece
        own = list(module.parameters(recurse=False))
        weight = getattr(module, "weight", None)
        if not own or not isinstance(weight, Tensor) or not isinstance(output, Tensor):
            return
        self._counted |= {id(parameter): parameter.numel() for parameter in own}
        if weight.ndim > 1:
            self._flop += 2 * weight.numel() * output.numel() / weight.shape[0]

    def of_step(self, model: nn.Module, batch_size: int) -> float | None:
        """Of forward and backward of a batch; None where that is not known."""
        elements = sum(parameter.numel() for parameter in model.parameters())
        if not self.samples or not batch_size or sum(self._counted.values()) < COUNTED * elements:
            return None
        return (1 + BACKWARD) * self._flop / self.samples * batch_size
