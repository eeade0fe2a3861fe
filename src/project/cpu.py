"""What a process may take of its host's CPU: cores, threads, memory."""

from __future__ import annotations

import math
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Parameters of mallopt, from glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3

# Of OpenMP's libraries, GNU's and Intel's: how idle threads wait.
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
LIBGOMP_SPINS = "300000"  # what GNU's does where nothing is set; about 3 ms
MOST_OF_OTHERS = 0.25  # cores


def usable_cores() -> int:
    """Cores of this host that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class CoresTaken:
    """What the usable cores have done since the host was started, and what this process has.

    Attributes:
        at_s: When, on the monotonic clock.
        busy_s: Of all processes, in seconds of one core.
        own_s: Of this process and those of its children that have ended; of the process that started it too, if asked.
        pid: This process.
    """

    at_s: float
    busy_s: float
    own_s: float
    pid: int

    @classmethod
    def until_now(cls, with_parent: bool = False) -> CoresTaken | None:
        """None on hosts that don't say (others than Linux).

        ``with_parent``: what the parent process takes is this process's own too.
        """
        try:
            table = Path("/proc/stat").read_text()
        except OSError:
            return None
        own_s = sum(os.times()[:4])
        if with_parent:
            import psutil  # here, since commands that start nothing do without

            with suppress(psutil.NoSuchProcess):
                own_s += sum(psutil.Process(os.getppid()).cpu_times()[:2])
        return cls(time.monotonic(), _busy_s(table, os.sched_getaffinity(0)), own_s, os.getpid())

    def of_others(self, before: CoresTaken) -> float:
        """Cores that other processes kept busy on average since then."""
        elapsed_s = self.at_s - before.at_s
        return (self.busy_s - before.busy_s - (self.own_s - before.own_s)) / elapsed_s if elapsed_s > 0 else math.inf


def _busy_s(table: str, cores: set[int]) -> float:
    """How long these cores have worked, from ``/proc/stat``; what other guests took counts too."""
    rows = (line.split() for line in table.splitlines())
    ticks = {row[0]: [int(number) for number in row[1:9]] for row in rows if row and row[0].startswith("cpu")}
    user_to_steal = [ticks[f"cpu{core}"] for core in cores if f"cpu{core}" in ticks]
    return sum(sum(core) - core[3] - core[4] for core in user_to_steal) / os.sysconf("SC_CLK_TCK")  # no idle, no iowait


def choose_waiting(since: CoresTaken | None, with_parent: bool = False) -> None:
    """Decide how idle OpenMP threads wait, for this process and all that it starts, before torch is imported.

    By default they spin for some milliseconds, so that the next operation starts at once. Where others use the cores
    too, a spinning thread keeps the one that it waits for from running. Two threads on two cores, a step of a tiny
    net: 0.22 ms spinning and 1.9 ms sleeping where nothing else runs; 0.65 to 40 ms and 0.32 ms with a core taken.

    What the user says of it stands, and so does what a process above has decided.

    Args:
        since: Taken as early as possible in this process. They sleep where that is not known: on a host that does not
            tell, and in another process (a job of a parallel sweep, which shares the cores with the others).
        with_parent: As ``since`` was taken.
    """
    if any(name in os.environ for name in WAITING):
        return
    now = CoresTaken.until_now(with_parent)
    if since is not None and now is not None and since.pid == now.pid and now.of_others(since) < MOST_OF_OTHERS:
        os.environ["GOMP_SPINCOUNT"] = LIBGOMP_SPINS  # as it is; set, so that no child decides anew
    else:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


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
    elif given := threads_given("OMP_NUM_THREADS") or threads_given("SLURM_CPUS_PER_TASK"):
        torch.set_num_threads(given)
    elif local_world_size > 1:
        torch.set_num_threads(max(1, usable_cores() // local_world_size))


def threads_given(name: str) -> int | None:
    """A variable's number of threads, of a list (one for each level of nesting) the first; None of what is none.

    OpenMP too goes by its default then, and says so.
    """
    first = os.environ.get(name, "").partition(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) else None


def keep_freed_memory() -> bool:
    """Let freed memory wait in the process for the next tensor, unless the environment says how malloc works.

    glibc gives every block above 32 MiB, and the free end of the heap, back to the system at once. The gradients and
    activations of a step are freed in each step, and the next one's first touch of each page of theirs is a page
    fault: a third of the step of an MLP of 3 million parameters. With ``model.net.width=1728``, on two cores in three
    turns, a step of the digits' MLP by hand takes 36 to 51 ms without this and 24 to 29 ms with it.

    Returns:
        Whether this C library can; others than glibc can't.
    """
    import ctypes  # takes 3 ms, which printing a config need not wait for

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
