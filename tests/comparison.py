"""Comparing the weights of runs."""

from collections.abc import Callable
from pathlib import Path

import torch

Run = Callable[..., tuple[Path, dict[str, float]]]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The last weights of a run."""
    state: dict[str, torch.Tensor] = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    return state


def largest_difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """Over all weights; infinite where the names differ."""
    if left.keys() != right.keys():
        return float("inf")
    return max(float((left[name].double() - right[name].double()).abs().max()) for name in left)
