"""Random numbers of a rank's own."""

import random

import numpy as np
import torch


def seed_rank(seed: int, rank: int) -> None:
    """Seed torch, NumPy and Python, reproducibly and differently for each rank."""
    own = seed + 1_000_003 * rank  # a prime: neighbouring seeds and ranks don't meet
    torch.manual_seed(own)
    np.random.seed(own % 2**32)
    random.seed(own)
