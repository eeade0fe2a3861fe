"""What DDP itself notes of its communication. Private to torch, so all is looked for, and may be missing."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

NEVER = 2**31 - 1  # steps


class DDPTimes:
    """The time that gradients take on their way, exposed and hidden behind the backward pass.

    Args:
        model: What the strategy trains; without DDP nothing is known.
        sample_every: Steps between two that DDP measures; on CUDA it waits for the device to read them.
    """

    def __init__(self, model: Any, sample_every: int) -> None:
        is_ddp = isinstance(model, DistributedDataParallel)
        self._model: DistributedDataParallel | None = model if is_ddp else None
        self._exposed_ms: list[float] = []
        self._overlap_ms: list[float] = []
        self._last_iteration = -1
        self._set_rate: Callable[[int], None] | None = getattr(
            self._model, "_set_ddp_runtime_logging_sample_rate", None
        )
        self._read_data: Callable[[], dict[str, Any]] | None = getattr(self._model, "_get_ddp_logging_data", None)
        self._sample_every = sample_every
        self.switch(True)

    def switch(self, on: bool) -> None:
        """Let DDP measure, or never."""
        if self._set_rate is not None:
            self._set_rate(self._sample_every if on else NEVER)

    def read(self) -> None:
        """Note the last step that DDP measured: 7 to 70 microseconds."""
        if self._read_data is None:
            return
        data = self._read_data()
        iteration = data.get("iteration", -1)
        if iteration == self._last_iteration or "backward_comm_time" not in data:
            return
        self._last_iteration = iteration
        overlap_ns = data.get("backward_compute_comm_overlap_time", 0)
        self._exposed_ms.append(max(0.0, (data["backward_comm_time"] - overlap_ns) / 1e6))
        self._overlap_ms.append(overlap_ns / 1e6)

    def take(self, syncs_per_batch: float) -> tuple[float, float]:
        """Milliseconds exposed and hidden for each batch, since the last call; NaN where nothing is known.

        Args:
            syncs_per_batch: Below 1 under accumulation: what DDP measures are batches whose gradients it sends.
        """
        exposed, overlap = self._exposed_ms, self._overlap_ms
        self._exposed_ms, self._overlap_ms = [], []
        if not exposed:
            return math.nan, math.nan
        share = syncs_per_batch / len(exposed)
        return sum(exposed) * share, sum(overlap) * share


class TimedBuffers:
    """Runs DDP's broadcast of buffers, at the start of forward, in a phase of its own."""

    def __init__(self, model: Any, phase: Callable[[str], AbstractContextManager[None]]) -> None:
        known = isinstance(model, DistributedDataParallel) and hasattr(model, "_sync_buffers")
        self._model: nn.Module | None = model if known else None
        if self._model is None:
            return
        broadcast = model._sync_buffers

        def timed() -> None:
            with phase("buffers"):
                broadcast()

        # Not through the module's own setattr, which looks for parameters.
        self._model.__dict__["_sync_buffers"] = timed

    def remove(self) -> None:
        if self._model is not None:
            self._model.__dict__.pop("_sync_buffers", None)
