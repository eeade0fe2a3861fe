"""Batches that are copied to the device while the one before is computed on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Generic, Protocol, TypeVar

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

Copy = TypeVar("Copy")


class Copies(Protocol, Generic[Copy]):
    """Copies under way to a device."""

    def start(self, batch: Any) -> Copy:
        """Begin to copy a batch, and return at once."""
        ...

    def finish(self, copy: Copy) -> Any:
        """The batch, to be computed on from now on."""
        ...


class CudaCopies:
    """Copies on a stream of their own, so that they need not wait for what is computed, nor it for them.

    From pageable memory a copy is not asynchronous: loaders pin the batches that go this way.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def start(self, batch: Any) -> tuple[Any, torch.cuda.Event]:
        with torch.cuda.stream(self.stream):
            moved = move_data_to_device(batch, self.device)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self.stream)
        return moved, event

    def finish(self, copy: tuple[Any, torch.cuda.Event]) -> Any:
        moved, event = copy
        computing = torch.cuda.current_stream(self.device)
        computing.wait_event(event)  # the device waits, not this thread
        # The memory belongs to the copying stream, which would reuse it before the computing one is done with it.
        apply_to_collection(moved, Tensor, lambda tensor: tensor.record_stream(computing))
        return moved


def ahead(batches: Iterable[Any], copies: Copies[Any]) -> Iterator[Any]:
    """The batches in their order, each of whose copies starts before the batch before it is asked for.

    Two batches are on the device at a time: the one that is computed on and the next.
    """
    waiting: list[Any] = []
    for batch in batches:
        waiting.append(copies.start(batch))
        if len(waiting) == 2:
            yield copies.finish(waiting.pop(0))
    for copy in waiting:
        yield copies.finish(copy)
