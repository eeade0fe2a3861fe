"""A LightningModule's ``training_step`` where the net's output comes from another rank, a micro-batch at a time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torchmetrics import Metric, MetricCollection

from project.errors import UserError
from project.strategies.pipelined_net import Context, PipelinedNet
from project.strategies.random_state import random_state, set_random_state

OF_METRIC = ("_update_count", "_computed", "_forward_cache")  # besides the states that it names itself
# How a value that is logged for each micro-batch becomes the batch's.
OVER_MICRO_BATCHES: dict[Any, Callable[[Tensor], Tensor]] = {
    "mean": torch.mean, "sum": torch.sum, "min": torch.amin, "max": torch.amax,
    torch.mean: torch.mean, torch.sum: torch.sum, torch.min: torch.amin, torch.max: torch.amax,
    min: torch.amin, max: torch.amax, sum: torch.sum,
}  # fmt: skip


class UserStep:
    """Runs the step as far as the net's call on the ranks that feed the net, and to its end on the last.

    It draws the same random numbers each time that it is run for one micro-batch, on any rank of the pipeline, and
    leaves the rank's own as they were. What it logs, and the metrics that it updates, only the last rank knows;
    ``told`` is that, and ``hear`` makes it so on the others.

    Args:
        module: Of the step.
        net: What stands in place of its net's ``forward``.
        context: Entered around the step, as for autocast.
    """

    def __init__(self, module: L.LightningModule, net: PipelinedNet, context: Context) -> None:
        self.module = module
        self.net = net
        self.context = context
        self._logged: dict[str, _Logged] = {}
        self._metrics = {name: part for name, part in module.named_modules() if isinstance(part, Metric)}
        self._collections = [part for part in module.modules() if isinstance(part, MetricCollection)]
        self._counts: dict[str, int] = {}

    def begin(self) -> None:
        """Note what is so before the step of a batch."""
        self._logged = {}
        self._counts = self._update_counts()

    def input_of(self, arguments: tuple[Any, ...], seed: int) -> Tensor:
        """What the step calls the net with.

        Raises:
            UserError: it does not call it.
        """

        def intercept(x: Tensor) -> Tensor:
            raise _NetIsCalledError(x)

        with self._running(intercept, seed):
            try:
                self.module.training_step(*arguments)
            except _NetIsCalledError as call:
                return call.x
        raise UserError(
            f"{type(self.module).__name__}.training_step does not call {self.net.name}, which a pipeline cuts into "
            "stages: type trainer.strategy.modules=[NAME] with what it calls, or trainer/strategy=fsdp"
        )

    def loss_of(self, arguments: tuple[Any, ...], output: Tensor, seed: int) -> Tensor:
        """The loss that the step makes of the net's output.

        Raises:
            UserError: it calls the net a second time, or returns no loss.
        """
        calls = 0

        def intercept(x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise UserError(
                    f"{type(self.module).__name__}.training_step calls {self.net.name} more than once, and a pipeline "
                    "runs it once a step: call it with all samples at once, or type trainer/strategy=fsdp"
                )
            return output

        with self._running(intercept, seed):
            returned = self.module.training_step(*arguments)
        loss = returned.get("loss") if isinstance(returned, Mapping) else returned
        if not isinstance(loss, Tensor) or loss.ndim:
            kind = f"a tensor {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise UserError(
                f"{type(self.module).__name__}.training_step returns {kind} as the loss, and each micro-batch of a "
                "pipeline needs a tensor without dimensions: return one, or type trainer/strategy=fsdp"
            )
        return loss

    def told(self) -> dict[str, Any]:
        """On the last rank, what the others don't know of the step yet: plain data and tensors of the CPU."""
        for collection in self._collections:
            collection.values(copy_state=False)  # metrics that are computed from another's counts get them
        changed = [name for name, count in self._update_counts().items() if count != self._counts[name]]
        if not self._logged and not changed:
            return {}
        metrics = {
            name: {key: getattr(self._metrics[name], key) for key in (*self._metrics[name]._defaults, *OF_METRIC)}
            for name in changed
        }
        entries = {name: (*entry.arguments, entry.value()) for name, entry in self._logged.items()}
        told: dict[str, Any] = tree_map_only(
            Tensor, lambda tensor: tensor.detach().cpu(), {"metrics": metrics, "logged": entries}
        )
        return told

    def hear(self, told: dict[str, Any]) -> None:
        """Take over what the last rank told, and log it as the step does."""
        told = tree_map_only(Tensor, lambda tensor: tensor.to(self.net.device), told)
        for name, states in told.get("metrics", {}).items() if not self.net.is_last else ():
            for key, value in states.items():
                setattr(self._metrics[name], key, value)
        for name, (args, kwargs, value) in told.get("logged", {}).items():
            self.module.log(name, self._metrics[value] if isinstance(value, str) else value, *args, **kwargs)

    def _update_counts(self) -> dict[str, int]:
        return {name: metric._update_count for name, metric in self._metrics.items()}

    @contextmanager
    def _running(self, intercept: Callable[[Tensor], Tensor], seed: int) -> Iterator[None]:
        before = random_state(self.net.device)
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        self.net.intercept = intercept
        self.module.__dict__["log"] = self._log
        try:
            with self.context():
                yield
        finally:
            del self.module.__dict__["log"]
            self.net.intercept = None
            set_random_state(before, self.net.device)

    def _log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        entry = self._logged.setdefault(name, _Logged((args, kwargs)))
        if isinstance(value, Metric):
            entry.metric = next(path for path, metric in self._metrics.items() if metric is value)
        else:
            entry.values.append(torch.as_tensor(value, device=self.net.device).detach().double())


class _Logged:
    """What a step logs under one name."""

    def __init__(self, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        self.arguments = arguments
        self.values: list[Tensor] = []
        self.metric: str | None = None

    def value(self) -> Tensor | str:
        """The value over all micro-batches, or the name of a metric."""
        if self.metric is not None:
            return self.metric
        over = OVER_MICRO_BATCHES.get(self.arguments[1].get("reduce_fx", "mean"), torch.mean)
        return over(torch.stack(self.values))


class _NetIsCalledError(BaseException):
    """Ends a training step at the net's call; no ``except Exception`` of the user's keeps it."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.x = x
