"""The exchange of weights and gradients under FSDP. Private to torch, so all is looked for, and may be missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

COLLECTIVES = ("_all_gather_comm", "_reduce_scatter_comm")  # of a group of parameters


class TimedShards:
    """Runs FSDP's collectives in a phase of their own, within forward and backward, which on the CPU wait for them.

    On CUDA they run beside the computation, and the host only queues them: nothing is known.

    Args:
        model: What the strategy trains; without FSDP nothing is known.
        phase: Enters a phase.
        on_cpu: Whether it is trained there.
    """

    def __init__(self, model: Any, phase: Callable[[str], AbstractContextManager[None]], on_cpu: bool) -> None:
        self._replaced: list[tuple[Any, str, Any]] = []
        if not on_cpu or not isinstance(model, nn.Module):
            return
        for group in _groups(model):
            for name in COLLECTIVES:
                if hasattr(group, name):
                    self._replaced.append((group, name, getattr(group, name)))
                    setattr(group, name, _Timed(getattr(group, name), phase))

    def remove(self) -> None:
        for group, name, collective in self._replaced:
            setattr(group, name, collective)


class _Timed:
    """A collective as FSDP calls it."""

    def __init__(self, collective: Any, phase: Callable[[str], AbstractContextManager[None]]) -> None:
        self.collective = collective
        self.allocate = collective.allocate
        self.phase = phase

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.phase("shards"):
            return self.collective(*args, **kwargs)


def _groups(model: nn.Module) -> Iterator[Any]:
    for part in model.modules():
        if isinstance(part, FSDPModule):
            state = part._get_fsdp_state()
            if hasattr(state, "_fsdp_param_groups"):
                yield from state._fsdp_param_groups
            elif getattr(state, "_fsdp_param_group", None) is not None:  # one, in torch of before
                yield state._fsdp_param_group
