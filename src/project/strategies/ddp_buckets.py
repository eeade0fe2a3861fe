"""The buckets in which DDP sums gradients, kept over the end of a process.

DDP begins with one bucket, and after the first step takes those in which gradients came. Where three ranks or more add
a number up, its place in a bucket decides in which order they do: a process that goes on must begin with the buckets
of the one before, or its first step differs in the last bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

Buckets = list[list[int]]  # of indices of the parameters that get gradients, in the order in which DDP sends them

_ASSIGN = "_compute_bucket_assignment_by_size"  # what DDP asks for its first buckets; private, so it may be missing


def buckets_of(model: Any) -> Buckets | None:
    """Those of a model under DDP; None before the first step, and where DDP keeps its first ones. For all ranks."""
    if not isinstance(model, DistributedDataParallel):
        return None
    ddp: Any = model
    # The private parts may be missing; a parameter without a gradient is told by the next step, which may never come.
    with contextlib.suppress(AttributeError, RuntimeError):
        if not ddp._get_ddp_logging_data().get("has_rebuilt_buckets"):
            # Else done, and noted, in the two steps to come.
            ddp.reducer._rebuild_buckets()
            ddp.logger.set_runtime_stats_and_log()
        return parsed(ddp._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices", ""))
    return None


def parsed(text: str) -> Buckets | None:
    """As torch writes them: ``5 4 3, 2 1 0``."""
    try:
        return [[int(index) for index in bucket.split()] for bucket in text.split(",")] if text else None
    except ValueError:
        return None


def begin_with(strategy: Any, buckets: Buckets) -> None:
    """Let a strategy that is DDP build its model with these, where they fit."""
    if not isinstance(strategy, DDPStrategy):
        return
    build = strategy._setup_model

    def build_in_buckets(model: Any) -> DistributedDataParallel:
        with bucketed(buckets):
            return build(model)

    strategy._setup_model = build_in_buckets  # type: ignore[method-assign]


@contextlib.contextmanager
def bucketed(buckets: Buckets) -> Iterator[None]:
    """DDP that is built inside begins with these buckets, or with its own where they don't fit its parameters."""
    assign_own = getattr(dist, _ASSIGN, None)
    if assign_own is None:
        yield
        return

    def assign(parameters: Sequence[Tensor], limits: list[int], sparse: list[bool], *more: Any) -> Any:
        if not fit(buckets, parameters, sparse):
            return assign_own(parameters, limits, sparse, *more)
        return buckets[::-1], [limits[-1]] * len(buckets)  # DDP reverses them

    setattr(dist, _ASSIGN, assign)
    try:
        yield
    finally:
        setattr(dist, _ASSIGN, assign_own)


def fit(buckets: Buckets, parameters: Sequence[Tensor], sparse: Sequence[bool]) -> bool:
    """Whether each parameter lies in one bucket, with none of another kind."""
    if sorted(index for bucket in buckets for index in bucket) != list(range(len(parameters))):
        return False
    for bucket in buckets:
        kinds = {(parameters[index].dtype, parameters[index].device) for index in bucket}
        if len(kinds) != 1 or (len(bucket) > 1 and any(sparse[index] for index in bucket)):
            return False
    return True
