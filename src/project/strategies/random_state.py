"""The random numbers that a rank draws next, as a value."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_state(*devices: torch.device) -> tuple[Any, ...]:
    """The state of torch's generators for the CPU and for CUDA ``devices``, of Python's and of NumPy's."""
    on_devices = [torch.cuda.get_rng_state(device) for device in devices if device.type == "cuda"]
    return torch.get_rng_state(), on_devices, random.getstate(), np.random.get_state()


def set_random_state(state: tuple[Any, ...], *devices: torch.device) -> None:
    """Go on from a state; generators of devices that it does not know stay as they are."""
    cpu, on_devices, python, numpy = state
    torch.set_rng_state(cpu)
    for device, own in zip((device for device in devices if device.type == "cuda"), on_devices, strict=False):
        torch.cuda.set_rng_state(own, device)
    random.setstate(python)
    np.random.set_state(numpy)
