"""The parts of a checkpoint that the ranks of a pipeline hold."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from project.strategies.sharded_checkpoint import Checkpoint, parameters_by_index


def gathered(own: Any, group: dist.ProcessGroup) -> list[Any]:
    """The nested dicts and lists of all ranks, in their order, in the first rank's memory; elsewhere nothing.

    Tensors are sent one at a time, so that no rank but the first needs memory for what is not its own; from the host's
    memory, where they are to be, and so by a group for the CPU.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    kinds = tree_map_only(Tensor, lambda tensor: tensor.detach().to("meta"), own)
    of_ranks: list[Any] | None = [None] * ranks if rank == 0 else None
    dist.gather_object(kinds, of_ranks, group=group, group_dst=0)
    if of_ranks is None:
        tree_map_only(
            Tensor, lambda tensor: dist.send(tensor.detach().cpu().contiguous(), group=group, group_dst=0), own
        )
        return []

    def received(source: int, kind: Tensor) -> Tensor:
        buffer = torch.empty(kind.shape, dtype=kind.dtype)
        dist.recv(buffer, group=group, group_src=source)
        return buffer

    others = [tree_map_only(Tensor, partial(received, source), of_ranks[source]) for source in range(1, ranks)]
    return [tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), own), *others]


def own_optimizer_state(state: Checkpoint, optimizer: torch.optim.Optimizer) -> Checkpoint:
    """Of an optimizer's state, what belongs to parameters that this rank has."""
    parameters = parameters_by_index(state, optimizer)
    own = {
        index: values
        for index, values in state["state"].items()
        if index in parameters and not parameters[index].is_meta
    }
    return state | {"state": own}
