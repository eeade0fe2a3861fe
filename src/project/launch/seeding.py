"""Random numbers: equal on all ranks while the model is built, different afterwards."""

import random

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback


class RankSeeds(Callback):
    """Gives each rank random numbers of its own when training starts: dropout and noise must not repeat.

    Not earlier: the model may be built as late as in ``configure_model``, from the same seed everywhere, and
    Lightning seeds all ranks alike when it sets up a strategy.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        seed_rank(self.seed, trainer.global_rank)


def seed_rank(seed: int, rank: int) -> None:
    """Seed torch, NumPy and Python, reproducibly and differently for each rank."""
    own = seed + 1_000_003 * rank  # a prime: neighbouring seeds and ranks don't meet
    torch.manual_seed(own)
    np.random.seed(own % 2**32)
    random.seed(own)
