"""Imports of what takes seconds to import."""

from __future__ import annotations

import gc
import importlib
import sys

NEEDED_BY_RANKS = (
    "lightning",
    "torchmetrics.classification",
    "torch.utils.tensorboard",
    "hydra.utils",
    "project.launch.rank",
    "project.training.checkpoint",
    "project.training.rank_states",
    "project.training.saving",
    "project.models",
    "project.data",
    "project.tracking.tensorboard",
    "project.tracking.tracker",
)

# What takes long of that, and can be imported before it is known how threads are to wait.
WITHOUT_TORCH = ("scipy.signal", "hydra.utils", "matplotlib.figure")

# What a training imports besides; a server does so ahead of many.
NEEDED_BY_TRAINING = (
    "project.training.trainer",
    "project.models.nets",
    "project.strategies.sharded_checkpoint",
    "project.tracking.hparams",
)


def import_for_good(*names: str) -> None:
    """Import these modules, and look for no garbage among what they make: neither meanwhile nor later.

    Lightning and all it needs make half a million objects that stay. The collector would walk them again and again
    while they grow in number (5.4 s instead of 4.2), once more when the process ends (1.8 s instead of 0.2), and in
    copies of the process, which would copy the pages that they lie on. So all that is there afterwards is frozen (see
    ``gc.freeze``).
    """
    if all(name in sys.modules for name in names):
        return  # what came since is not for good
    collects = gc.isenabled()
    gc.disable()
    try:
        for name in names:
            importlib.import_module(name)
        gc.freeze()
    finally:
        if collects:
            gc.enable()


def import_for_ranks() -> None:
    """Import what every rank of every command needs."""
    import_for_good(*NEEDED_BY_RANKS)
