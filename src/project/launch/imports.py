"""Imports of what takes seconds to import."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from contextlib import contextmanager

NEEDED_BY_RANKS = (
    "lightning",
    "torchmetrics.classification",
    "torch.utils.tensorboard",
    "hydra.utils",
    "project.launch.rank",
    "project.launch.checkpoint",
    "project.launch.rank_states",
    "project.launch.saving",
    "project.models",
    "project.data",
    "project.tracking.tensorboard",
    "project.tracking.tracker",
)


@contextmanager
def uncollected() -> Iterator[None]:
    """Import within this without a search for garbage.

    Imports make half a million objects that stay, which the collector walks again and again while they grow in number:
    Lightning and all it needs took 5.4 s with it, 4.2 s without.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def import_for_ranks() -> None:
    """Import what every rank of every command needs."""
    with uncollected():
        for name in NEEDED_BY_RANKS:
            importlib.import_module(name)
