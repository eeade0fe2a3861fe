"""What a host must have besides devices: cores, memory, shared memory, open files, disk, a name."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from project.checkup.finding import Finding, Status, graded
from project.cpu import usable_cores

GIB = 2**30
SHARED_MEMORY = Path("/dev/shm")


def check(outputs: Path, num_gpus: int) -> Iterator[Finding]:
    """Each of them; ``outputs`` is where runs will be written, ``num_gpus`` how many devices share the cores."""
    yield cores(num_gpus)
    yield memory()
    if sys.platform == "linux":
        yield shared_memory(SHARED_MEMORY)
    if sys.platform != "win32":
        yield open_files()
    yield free_disk(outputs)
    yield own_name()


def cores(num_gpus: int) -> Finding:
    """Cores that this process may use: its affinity and its container's quota count, not the machine."""
    usable = float(usable_cores())
    usable = min(usable, _cpu_quota())
    per_device = usable / max(1, num_gpus)
    value = f"{usable:g} of {os.cpu_count()}" + (f", {per_device:g} for each GPU" if num_gpus else "")
    remedy = (
        "ask for more cores (SLURM: --cpus-per-task, Docker: --cpus); with this few, data.num_workers=0 or 1"
        if num_gpus
        else "ask for more cores (SLURM: --cpus-per-task, Docker: --cpus)"
    )
    return graded("CPU cores", value, per_device, 2, 0, remedy)


def _cpu_quota(path: Path = Path("/sys/fs/cgroup/cpu.max")) -> float:
    """Cores that the control group may use in all (Linux's cgroup v2: ``QUOTA PERIOD``), infinite without one."""
    try:
        quota, period = path.read_text().split()
        return float("inf") if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return float("inf")


def memory() -> Finding:
    """Memory that is free for use."""
    free, total = psutil.virtual_memory().available, psutil.virtual_memory().total
    value = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
    return graded(
        "memory", value, free / GIB, 4, 0.5, "end what holds it (top -o %MEM), or ask for more (SLURM: --mem)"
    )


def shared_memory(folder: Path) -> Finding:
    """Where data loader workers put their batches: with too little they die of a bus error."""
    remedy = "docker run --shm-size=8g (or as root: mount -o remount,size=8g /dev/shm); until then data.num_workers=0"
    if not os.access(folder, os.W_OK):
        return Finding(str(folder), "not there, or not to be written", Status.BROKEN, remedy)
    usage = shutil.disk_usage(folder)
    value = f"{usage.free / GIB:.2g} of {usage.total / GIB:.2g} GiB free"
    return graded(str(folder), value, usage.free / GIB, 1, 0.0626, remedy)  # Docker gives 64 MiB unless told


def open_files() -> Finding:
    """A tensor that a loader worker hands over is an open file; so are sockets between ranks."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    infinite = resource.RLIM_INFINITY
    usable = float("inf") if soft == infinite else soft
    if hard == infinite or hard >= 4096:
        remedy = f"ulimit -n {65536 if hard == infinite else min(hard, 65536)}"
    else:
        remedy = "raise the hard limit in /etc/security/limits.conf (Docker: --ulimit nofile=65536)"
    return graded("open files", f"at most {'any number' if soft == infinite else soft}", usable, 1024, 512, remedy)


def free_disk(outputs: Path) -> Finding:
    """Where runs will be written, checkpoints above all."""
    folder = next(path for path in [outputs.absolute(), *outputs.absolute().parents] if path.exists())
    remedy = "type paths.outputs=FOLDER with a folder on another disk"
    if not os.access(folder, os.W_OK):
        return Finding("disk", f"{folder} can't be written", Status.BROKEN, remedy)
    free = shutil.disk_usage(folder).free / GIB
    return graded("disk", f"{free:.1f} GiB free in {folder}", free, 10, 0.5, remedy)


def own_name() -> Finding:
    """Ranks tell each other where they are by the host's name, which must have an address."""
    name = socket.gethostname()
    try:
        return Finding("host name", f"{name} is {socket.gethostbyname(name)}")
    except OSError:
        remedy = f"add a line '127.0.0.1 {name}' to /etc/hosts, or export GLOO_SOCKET_IFNAME=lo for ranks of this host"
        return Finding("host name", f"{name} has no address", Status.WARNING, remedy)
