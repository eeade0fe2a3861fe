"""When this process began."""

import os
import time
from pathlib import Path

import psutil


def process_started_at() -> float:
    """Seconds since 1970, to a hundredth on Linux.

    psutil adds the process's age at boot to the second of the boot, and is early by what that second leaves out.
    """
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # starttime, see proc(5)
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return psutil.Process().create_time()
