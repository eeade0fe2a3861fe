"""What the machine tells of a rank: memory, CPU, and the GPU's sensors; and how fast its GPU could be."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable

import psutil
import torch

# Dense bf16 FLOPs per second by a word of the device's name, from the vendors' data sheets; the first that fits counts.
PEAKS = (
    ("B200", 2250e12),
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("A100", 312e12),
    ("A10G", 70e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("MI300X", 1307e12),
)


def peak_flops_per_s(device: torch.device) -> float:
    """What a device could do at most in bf16; NaN where that is not known, as for CPUs."""
    if device.type != "cuda":
        return math.nan
    name = torch.cuda.get_device_name(device)
    if " MIG " in name:  # a part of what the name says
        return math.nan
    return next((peak for word, peak in PEAKS if word in name), math.nan)


class Machine:
    """Read at the end of a window.

    Args:
        device: On which the rank computes.
        tell: Is given a sentence, once, where the GPU's sensors can't be read.
    """

    def __init__(self, device: torch.device, tell: Callable[[str], None]) -> None:
        self._device = device
        self._tell = tell
        self._process = psutil.Process()
        self._has_sensors = device.type == "cuda"
        self._cpu_s, self._at = self._cpu_seconds(), time.perf_counter()

    def read(self) -> dict[str, float]:
        """Fields of a `Window`; of what has no value here, none."""
        values = {
            "memory_bytes": float(self._process.memory_info().rss),
            "memory_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RUSAGE_UNIT,
            "cpu": self._cores(),
        }
        if self._device.type == "cuda":
            values["device_bytes"] = float(torch.cuda.memory_allocated(self._device))
            values["device_peak_bytes"] = float(torch.cuda.max_memory_allocated(self._device))
        return values | self._sensors()

    def _cores(self) -> float:
        cpu_s, at = self._cpu_seconds(), time.perf_counter()
        cores = (cpu_s - self._cpu_s) / max(1e-9, at - self._at)
        self._cpu_s, self._at = cpu_s, at
        return cores

    def _cpu_seconds(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def _sensors(self) -> dict[str, float]:
        if not self._has_sensors:
            return {}
        try:
            return {
                "gpu_percent": float(torch.cuda.utilization(self._device)),
                "gpu_celsius": float(torch.cuda.temperature(self._device)),
                "gpu_watts": torch.cuda.power_draw(self._device) / 1e3,
            }
        except Exception as error:  # the driver's library raises its own, and none of them may end a training
            self._has_sensors = False
            self._tell(f"the GPU's use, temperature and power are not shown, its sensors can't be read: {error}")
            return {}


_RUSAGE_UNIT = 1.0 if sys.platform == "darwin" else 1024.0  # bytes there, kibibytes on Linux
