"""The random numbers that a rank draws next, as a value."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_state(device: torch.device) -> tuple[Any, ...]:
    """The state of torch's generators for the CPU and for ``device``, of Python's and of NumPy's."""
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), on_device, random.getstate(), np.random.get_state()


def set_random_state(state: tuple[Any, ...], device: torch.device) -> None:
    """Go on from a state of a device of the same kind."""
    cpu, on_device, python, numpy = state
    torch.set_rng_state(cpu)
    if on_device is not None:
        torch.cuda.set_rng_state(on_device, device)
    random.setstate(python)
    np.random.set_state(numpy)
