"""What a process may take of its host's CPU: cores, threads, memory."""

from __future__ import annotations

import ctypes
import os
from typing import Any

# Parameters of mallopt, from glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def usable_cores() -> int:
    """Cores of this host that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def settle(config: dict[str, Any], local_world_size: int) -> None:
    """Take what ``launch`` grants to one of so many ranks of this host."""
    launch = config["launch"]
    share_threads(launch["threads_per_rank"], local_world_size)
    if launch.get("keep_freed_memory", True) and not on_cuda(config):
        keep_freed_memory()


def share_threads(threads_per_rank: int | str, local_world_size: int) -> None:
    """Give this rank its CPU threads: without a limit each rank takes all cores, and they fight for them."""
    import torch

    if threads_per_rank != "auto":
        torch.set_num_threads(int(threads_per_rank))
    elif given := os.environ.get("OMP_NUM_THREADS") or os.environ.get("SLURM_CPUS_PER_TASK"):
        torch.set_num_threads(int(given))
    elif local_world_size > 1:
        torch.set_num_threads(max(1, usable_cores() // local_world_size))


def keep_freed_memory() -> bool:
    """Let freed memory wait in the process for the next tensor, unless the environment says how malloc works.

    glibc gives every block above 32 MiB, and the free end of the heap, back to the system at once. The gradients and
    activations of a step are freed in each step, and the next one's first touch of each page of theirs is a page
    fault: a third of the step of an MLP of 3 million parameters.

    Returns:
        Whether this C library can; others than glibc can't.
    """
    if any(name.startswith("MALLOC_") for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is None:
        return False
    # Blocks above 1 GiB still go back: few of a step are so large. glibc before 2.33 refuses more than 32 MiB.
    mapped = mallopt(M_MMAP_THRESHOLD, 2**30) or mallopt(M_MMAP_THRESHOLD, 2**25)
    return bool(mapped and mallopt(M_TRIM_THRESHOLD, -1))


def on_cuda(config: dict[str, Any]) -> bool:
    """Whether the config's accelerator is CUDA here."""
    import torch

    return config["trainer"]["accelerator"] in ("auto", "gpu", "cuda") and torch.cuda.is_available()
