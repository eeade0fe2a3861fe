"""Random numbers that belong to a sample, whoever draws them: any rank, any worker, in any batch.

Arithmetic on 64 bits without a sign overflows by design, as NumPy's does on arrays.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_STEP = np.uint64(0x9E3779B97F4A7C15)


def sample_seeds(epoch_seed: int, indices: Tensor) -> Tensor:
    """A seed for each sample of an epoch: (B,) int64, from its index in the dataset, (B,)."""
    return _from_bits(_mixed(_bits(indices) + np.array([epoch_seed], np.uint64) * _STEP))


def uniforms(seeds: Tensor, count: int) -> Tensor:
    """`count` numbers in [0, 1) from each seed (B,) int64: (B, count) float64.

    SplitMix64, after Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators": its k-th number
    depends on the seed and k alone, so that a whole batch is drawn at once.
    """
    states = _bits(seeds)[:, None] + np.arange(1, count + 1, dtype=np.uint64) * _STEP
    return torch.from_numpy((_mixed(states) >> np.uint64(11)) * 2.0**-53)


def _mixed(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def _bits(numbers: Tensor) -> NDArray[np.uint64]:
    bits: NDArray[np.uint64] = numbers.numpy().view(np.uint64)
    return bits


def _from_bits(bits: NDArray[np.uint64]) -> Tensor:
    return torch.from_numpy(bits.view(np.int64))
