"""A net that is cut into stages, which ranks run on micro-batches one after another."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from project.errors import UserError
from project.strategies.pipeline_layout import PipelineLayout
from project.strategies.random_state import random_state, set_random_state
from project.strategies.single_process import ReplacedForward
from project.strategies.stages import chain_of, refuse_tied_weights, split

PLANS_KEPT = 8  # each has the buffers to receive what its shapes need
Context = Callable[[], AbstractContextManager[Any]]
Loss = Callable[[int, Tensor], Tensor]
Kind = tuple[torch.Size, torch.dtype]


class PipelinedNet(ReplacedForward):
    """In place of a net's ``forward``: the net over all ranks of a pipeline, of which this rank holds some stages.

    Called outside of training, by all ranks with equal arguments, it returns the whole output to each, without
    gradients. The parts of other ranks are put on the meta device: their parameters keep names and shapes.

    Args:
        net: Whole, and the same on all ranks.
        name: What it is called in the LightningModule.
        layout: Of the pipeline.
        group: Its ranks.
        device: Of this rank.
        context: Entered around each stage's ``forward``, as for autocast.

    Raises:
        UserError: the net is no chain, has too few parts, or stages would share a parameter.
    """

    def __init__(
        self,
        net: nn.Module,
        name: str,
        layout: PipelineLayout,
        group: dist.ProcessGroup,
        device: torch.device,
        context: Context,
    ) -> None:
        super().__init__(net, name)
        self.layout = layout
        self.group = group
        self.device = device
        self.rank = dist.get_rank(group)
        self.intercept: Callable[[Tensor], Tensor] | None = None  # called instead, while a training step runs
        self._signature = inspect.signature(net.forward)
        self._plans: dict[Any, _Plan] = {}
        self._loss_of: Loss | None = None
        parts = split(chain_of(net), layout.stages)
        refuse_tied_weights(parts)
        self._stages = {
            number: _Stage([part for _, part in parts[number]], context)
            for number in range(layout.stages)
            if number % layout.ranks == self.rank
        }
        for number, stage in enumerate(parts):
            for _, part in stage if number not in self._stages else ():
                part.to("meta")

    @property
    def is_first(self) -> bool:
        """Whether this rank has the first stage, which reads the input."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage, which knows the output and the loss."""
        return self.rank == self.layout.ranks - 1

    def to_device(self) -> None:
        for stage in self._stages.values():
            stage.to(self.device)

    def run(self, *args: Any, **kwargs: Any) -> Tensor:
        x = self._argument(args, kwargs)
        if self.intercept is not None:
            return self.intercept(x)
        number, size = self.layout.cut_padded(len(x))
        missing = number * size - len(x)
        filled = torch.cat([x, x[-1:].expand(missing, *x.shape[1:])]) if missing else x
        with torch.no_grad():
            plan = self._plan(filled[:size], number, training=False)
            output = plan.schedule.step(*((filled,) if self.is_first else ()))
            plan.clear()
            shape, dtype = plan.output
            if output is None:
                output = torch.empty(number * shape[0], *shape[1:], dtype=dtype, device=self.device)
            dist.broadcast(output, group_src=self.layout.ranks - 1, group=self.group)
        own: Tensor = output[: len(output) * len(x) // len(filled)]
        return own

    def train(self, inputs: Sequence[Tensor], micro_batches: int, loss_of: Loss) -> Tensor:
        """Run forward and backward; gradients are added to the parameters' ``grad``.

        Args:
            inputs: Of all micro-batches on the first rank; elsewhere of one of them.
            micro_batches: Number of them.
            loss_of: A micro-batch's share of the loss, from its number and the net's output; for the last rank.

        Returns:
            The sum of the losses, () float64, on all ranks.
        """
        kinds = {(x.shape, x.dtype) for x in inputs}
        if len(kinds) > 1:
            raise UserError(
                f"training_step calls {self.name} with another shape in each micro-batch "
                f"({', '.join(str(tuple(shape)) for shape, _ in kinds)}), and a pipeline passes on equal ones: pad the "
                "samples to one length, or type trainer/strategy=fsdp"
            )
        plan = self._plan(inputs[0], micro_batches, training=True)
        losses: list[Tensor] = []
        self._loss_of = loss_of
        try:
            plan.schedule.step(
                *((torch.cat(list(inputs)),) if self.is_first else ()),
                target=torch.arange(micro_batches) if self.is_last else None,
                losses=losses if self.is_last else None,
                return_outputs=False,
            )
        finally:
            self._loss_of = None
            plan.clear()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for loss in losses:
            total += loss.detach()
        dist.broadcast(total, group_src=self.layout.ranks - 1, group=self.group)
        return total

    def _argument(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        given = [value for value in self._signature.bind(*args, **kwargs).arguments.values() if value is not None]
        if len(given) != 1 or not isinstance(given[0], Tensor) or not given[0].ndim or not len(given[0]):
            kinds = ", ".join(type(value).__name__ for value in given) or "nothing"
            raise UserError(
                f"{self.name} is called with {kinds}, and a pipeline passes on one tensor whose first dimension is the "
                "batch's: call it so, or type trainer/strategy=fsdp"
            )
        return given[0]

    def _plan(self, example: Tensor, micro_batches: int, training: bool) -> _Plan:
        """The schedule for micro-batches like ``example``; all ranks make it together, where it is new."""
        key = (training, torch.is_inference_mode_enabled(), example.shape, example.dtype, micro_batches)
        plan = self._plans.pop(key, None) or self._new_plan(example, micro_batches, training)
        self._plans[key] = plan  # the last used stands last
        if len(self._plans) > PLANS_KEPT:
            del self._plans[next(iter(self._plans))]
        return plan

    def _new_plan(self, example: Tensor, micro_batches: int, training: bool) -> _Plan:
        kinds = self._kinds(example)

        def like(number: int) -> Tensor:
            """What goes into the stage ``number``."""
            shape, dtype = kinds[number]
            needs_gradient = training and number > 0 and dtype.is_floating_point
            return torch.empty(shape, dtype=dtype, device="meta", requires_grad=needs_gradient)

        # With shapes given, torch need not find them by a step of its own, which would count in batch norm and logs.
        stages = [
            PipelineStage(
                stage, number, self.layout.stages, self.device, like(number), like(number + 1), group=self.group
            )
            for number, stage in self._stages.items()
        ]
        # The losses are shares of one sum, so the gradients are right as they are.
        common = {"n_microbatches": micro_batches, "loss_fn": self._loss if training else None, "scale_grads": False}
        if self.layout.schedule == "interleaved":
            return _Plan(ScheduleInterleaved1F1B(stages, **common), stages, kinds[-1])  # type: ignore[arg-type]
        schedule = Schedule1F1B if self.layout.schedule == "1f1b" and training else ScheduleGPipe
        return _Plan(schedule(stages[0], **common), stages, kinds[-1])  # type: ignore[arg-type]

    def _kinds(self, example: Tensor) -> list[Kind]:
        """Shape and type of what goes into each stage, and of the output: each rank tries its stages on zeros."""
        kinds: list[Kind] = [(example.shape, example.dtype)]
        state = random_state(self.device)
        buffers = [(b, b.clone()) for stage in self._stages.values() for b in stage.buffers()]  # batch norm counts
        for number in range(self.layout.stages):
            told: list[Any] = [None]
            if number in self._stages:
                shape, dtype = kinds[-1]
                with torch.no_grad():
                    output = self._stages[number](torch.zeros(shape, dtype=dtype, device=self.device))
                told = [(output.shape, output.dtype)]
            dist.broadcast_object_list(told, group_src=number % self.layout.ranks, group=self.group)
            kinds.append(told[0])
        for buffer, before in buffers:
            buffer.copy_(before)
        set_random_state(state, self.device)
        return kinds

    def _loss(self, output: Tensor, micro_batch: Tensor) -> Tensor:
        assert self._loss_of is not None
        return self._loss_of(int(micro_batch), output)


class _Stage(nn.Module):
    """Parts of a net, called one after another."""

    def __init__(self, parts: Sequence[nn.Module], context: Context) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.context = context

    def forward(self, x: Tensor) -> Tensor:
        with self.context():
            for part in self.parts:
                x = part(x)
                if not isinstance(x, Tensor):
                    raise UserError(
                        f"{type(part).__name__} returns a {type(x).__name__}, and a pipeline passes on one tensor from "
                        "part to part: let it return a tensor, or type trainer/strategy=fsdp"
                    )
        return x.contiguous()  # as it is sent


@dataclass(frozen=True)
class _Plan:
    schedule: Any
    stages: list[PipelineStage]
    output: Kind  # of one micro-batch

    def clear(self) -> None:
        """Let go of the activations."""
        for stage in self.stages:
            stage.clear_runtime_states()
