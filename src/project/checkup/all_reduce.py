"""A real all-reduce between ranks of this host: does it work, and how fast is it by message size?

python -m project.checkup.all_reduce RANKS REPORT.json
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from project.checkup.finding import Finding, Status

SIZES = {"64 KiB": 2**16, "1 MiB": 2**20, "16 MiB": 2**24}
REPEATS = 5
REMEDY = (
    "see the host name above, export GLOO_SOCKET_IFNAME=lo (NCCL_SOCKET_IFNAME=lo), and NCCL_DEBUG=INFO to learn more"
)


def check(num_ranks: int, timeout_s: float) -> Iterator[Finding]:
    """Two ranks, four, and so on to ``num_ranks``; in processes of their own, which are ended after ``timeout_s``."""
    with tempfile.TemporaryDirectory(prefix="project-doctor-") as folder:
        report = Path(folder, "report.json")
        command = [sys.executable, "-m", __spec__.name, str(num_ranks), str(report)]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
        )
        try:
            _, errors = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            yield Finding(f"all-reduce of {num_ranks} ranks", f"no end after {timeout_s:g} s", Status.BROKEN, REMEDY)
            return
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        if process.returncode != 0:
            said = errors.decode(errors="replace").strip().splitlines() or [f"exit code {process.returncode}"]
            yield Finding(f"all-reduce of {num_ranks} ranks", said[-1], Status.BROKEN, REMEDY)
            return
        for row in json.loads(report.read_text()):
            yield _told(row["ranks"], row["backend"], row["seconds"])


def _told(num_ranks: int, backend: str, seconds: dict[str, float]) -> Finding:
    rates = {size: bus_bandwidth(SIZES[size], num_ranks, took_s) / 1e9 for size, took_s in seconds.items()}
    value = ", ".join(f"{rate:.2f} GB/s at {size}" for size, rate in rates.items())
    figures = {f"gb_per_s_at_{SIZES[size]}_bytes": rate for size, rate in rates.items()}
    return Finding(f"all-reduce of {num_ranks} ranks", f"{value} ({backend})", figures=figures)


def bus_bandwidth(num_bytes: int, num_ranks: int, seconds: float) -> float:
    """Bytes a second that each link carries, whatever the number of ranks: ``2 (n - 1) / n`` of the message.

    Source: nccl-tests, PERFORMANCE.md.
    """
    return num_bytes / seconds * 2 * (num_ranks - 1) / num_ranks


def _rank(rank: int, num_ranks: int, folder: str, report: str) -> None:
    import torch
    import torch.distributed as dist

    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= num_ranks
    backend = "nccl" if on_gpu else "gloo"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks, timeout=timedelta(seconds=60)
    )
    rows = []
    counts = [2**power for power in range(1, num_ranks.bit_length()) if 2**power < num_ranks] + [num_ranks]
    for count in counts:
        group = dist.new_group(range(count))
        if rank < count:
            seconds = {}
            for name, num_bytes in SIZES.items():
                message = torch.ones(num_bytes // 4, device=device)
                times = []
                for _ in range(1 + REPEATS):
                    message.fill_(1)
                    dist.barrier(group)
                    begin = time.perf_counter()
                    dist.all_reduce(message, group=group)
                    if on_gpu:
                        torch.cuda.synchronize()
                    times.append(time.perf_counter() - begin)
                if not bool((message == count).all()):
                    raise ValueError(f"the sum of ones over {count} ranks is not {count} everywhere")
                seconds[name] = min(times[1:])
            rows.append({"ranks": count, "backend": backend, "seconds": seconds})
        dist.barrier()
    if rank == 0:
        Path(report).write_text(json.dumps(rows))
    dist.destroy_process_group()


def main(num_ranks: int, report: str) -> None:
    """Start the ranks, and wait for them."""
    from torch.multiprocessing.spawn import spawn

    with tempfile.TemporaryDirectory(prefix="project-doctor-") as folder:
        spawn(_rank, (num_ranks, folder, report), nprocs=num_ranks)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
