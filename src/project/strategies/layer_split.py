"""Model parallelism in its simplest form, in one process: the strategy `layer_split`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from project.batch import batch_length
from project.compiled import is_compiled
from project.errors import UserError
from project.strategies.batches import chunks, gather, share
from project.strategies.single_process import ReplacedForward, SingleProcessStrategy, is_in
from project.strategies.stages import Part, chain_of, refuse_tied_weights, split, taken_out

Stages = list[list[Part]]


class LayerSplitStrategy(SingleProcessStrategy):
    """Puts consecutive parts of chosen submodules on different devices, and moves activations from one to the next.

    A chosen submodule is a chain of parts (see `project.strategies.stages`), cut into as many stages as there are
    devices. All else of the model, the batch, the loss and the metrics are on the first device, and the output comes
    back to it; so loss and metrics see the full batch, once. Gradients and the states of optimizers are where their
    weights are; clipping, gradient scalers and torch's optimizers take weights of several devices.

    With one micro-batch the numbers are those of one device, and one device works at a time. With more, a device
    works on a micro-batch while the next has the one before; all activations are kept until the backward pass.
    Batches are cut and outputs joined as `project.strategies.batches` says. Batch norm then normalizes each
    micro-batch by itself, and each moves its running statistics. Only CUDA devices work at the same time, as their work
    is queued and not waited for.

    Hooks of a chosen submodule run once, with the full batch, those of its parts for each micro-batch; those of
    containers in between, such as a list of blocks, don't run. On CPU, `devices=N` makes N stages on the one device.

    Args:
        modules: Dotted names of the submodules that are split.
        micro_batches: Parts M that a batch is cut into: of D equally fast devices, each then works for M / (M + D - 1)
            of the time.
        boundaries: Names of the parts that the second and all later stages begin with; by default stages hold about
            equally many bytes. For one submodule only.
        base: As of Lightning's strategies.

    Raises:
        UserError: As `SingleProcessStrategy`; also for a submodule that is no chain, fewer parts than devices, weights
            that two devices would share, a submodule that `torch.compile` traces whole.
    """

    strategy_name = "layer_split"
    alternative = "fsdp"

    def __init__(
        self,
        modules: Sequence[str] = ("net",),
        micro_batches: int = 1,
        boundaries: Sequence[str] | None = None,
        **base: Any,
    ) -> None:
        super().__init__(modules, **base)
        if type(micro_batches) is not int or micro_batches < 1:
            raise UserError(
                f"trainer.strategy.micro_batches={micro_batches} can't be: type trainer.strategy.micro_batches= with a "
                "whole number from 1"
            )
        if boundaries is not None and len(self.modules) > 1:
            raise UserError(
                f"trainer.strategy.boundaries={list(boundaries)} are parts of one module, and trainer.strategy.modules "
                f"names {', '.join(self.modules)}: type trainer.strategy.boundaries=null"
            )
        self.micro_batches = micro_batches
        self.boundaries = [boundaries] if isinstance(boundaries, str) else boundaries
        self._stages: dict[str, Stages] = {}  # of each chosen submodule

    def setup(self, trainer: L.Trainer) -> None:
        # As Lightning's, but for the states of optimizers, which stay beside their weights.
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        self.model = self._setup_model(self.model)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)  # beside the weights, too

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        with super().tensor_init_context(empty_init), torch.device("cpu"):  # the first device may not hold the model
            yield

    def chosen(self, model: nn.Module) -> dict[str, nn.Module]:
        chosen = super().chosen(model)
        for path, part in model.named_modules() if len(self._devices) > 1 else ():
            for name, module in chosen.items():
                if is_compiled(part) and is_in(module, part):
                    raise UserError(
                        f"trainer.strategy=layer_split runs {name} on several devices, and torch.compile, which "
                        f"compiled {path or type(part).__name__}, would trace it as a whole: type model.compile=false, "
                        "or trainer/strategy=fsdp"
                    )
                if part is module and "forward" in vars(part):
                    raise UserError(
                        f"trainer.strategy=layer_split calls the parts of {name} in place of its forward, which here "
                        "was set on the instance: define it in the class, or type trainer/strategy=fsdp"
                    )
        return chosen

    def model_to_device(self) -> None:
        assert self.model is not None
        chosen = self.chosen(self.model) if len(self._devices) > 1 else {}
        self._stages = {
            name: split(chain_of(module), len(self._devices), self.boundaries) for name, module in chosen.items()
        }
        on_device: Stages = [
            [(f"{name}.{inner}", part) for name, stages in self._stages.items() for inner, part in stages[index]]
            for index in range(len(self._devices))
        ]
        with taken_out(self.model, [name for stage in on_device for name, _ in stage]):
            refuse_tied_weights([[("", self.model), *on_device[0]], *on_device[1:]])
            self.model.to(self.root_device)
        for device, stage in zip(self._devices, on_device, strict=True):
            for _, part in stage:
                part.to(device)

    def replacement(self, module: nn.Module, name: str) -> ReplacedForward:
        return StagedForward(module, name, self._stages[name], self._devices, self.micro_batches)

    def teardown(self) -> None:
        super().teardown()
        self._stages = {}


class StagedForward(ReplacedForward):
    """In place of a module's `forward`: its parts one after another, each on its device."""

    def __init__(
        self, module: nn.Module, name: str, stages: Stages, devices: Sequence[torch.device], micro_batches: int
    ) -> None:
        super().__init__(module, name)
        self.stages = list(zip(devices, stages, strict=True))
        self.micro_batches = micro_batches

    def run(self, *args: Any, **kwargs: Any) -> Any:
        root, _ = self.stages[0]
        batch = batch_length((args, kwargs))
        rows = chunks(batch or 0, self.micro_batches)
        if len(rows) < 2:
            return _moved(self._through(args, kwargs), root)
        shares = [share((args, kwargs), batch, part, root) for part in rows]
        # Joined when all are on their way: a copy waits for what is queued on both of its devices.
        outputs = [self._through(*part) for part in shares]
        return gather(outputs, [len(range(*part.indices(batch or 0))) for part in rows], root, self.name)

    def _through(self, args: Any, kwargs: Any) -> Any:
        for number, (device, parts) in enumerate(self.stages):
            try:
                with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                    args, kwargs = _moved((args, kwargs), device)
                    for _, part in parts:
                        args, kwargs = (part(*args, **kwargs),), {}
            except Exception as error:
                error.add_note(f"in stage {number} of {len(self.stages)} of {self.name}, on {device}")
                raise
        return args[0]


def _moved(value: Any, device: torch.device) -> Any:
    return share(value, None, slice(None), device)
