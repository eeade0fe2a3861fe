"""How fast the devices compute and copy: a matrix product on each, and the way from the host's memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from project.checkup.finding import Finding, Status

COPY_BYTES = 256 * 2**20


def check() -> Iterator[Finding]:
    """The CPU, then each CUDA device; one that is much slower than its fastest like is a warning."""
    yield _product("CPU", torch.device("cpu"), 1024, torch.float32)
    by_name: dict[str, list[tuple[int, Finding]]] = {}
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        device = torch.device("cuda", index)
        for dtype in (torch.float32, torch.bfloat16):
            finding = _product(f"cuda:{index}", device, 8192, dtype)
            key = f"{torch.cuda.get_device_name(index)} {dtype}"
            by_name.setdefault(key, []).append((index, finding))
            yield finding
        yield from _copies(index, device)
    yield from _slow_ones(by_name)


def _product(name: str, device: torch.device, size: int, dtype: torch.dtype) -> Finding:
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds = shortest_s(lambda: a @ b, device)
    gflops = 2 * size**3 / seconds / 1e9
    kind = str(dtype).removeprefix("torch.")
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    value = f"{gflops:,.0f} GFLOP/s ({size} x {size}, {kind}{threads})"
    return Finding(f"{name} matrix product", value, figures={"gflop_per_s": gflops})


def _copies(index: int, device: torch.device) -> Iterator[Finding]:
    pageable = torch.empty(COPY_BYTES, dtype=torch.uint8)
    rates = {}
    for kind, source in (("pinned", pageable.pin_memory()), ("pageable", pageable)):
        seconds = shortest_s(partial(source.to, device, non_blocking=True), device)
        rates[kind] = COPY_BYTES / seconds / 1e9
    value = f"{rates['pinned']:.1f} GB/s from pinned memory, {rates['pageable']:.1f} from pageable"
    yield Finding(f"host to cuda:{index}", value, figures={f"{kind}_gb_per_s": rate for kind, rate in rates.items()})


def _slow_ones(by_name: dict[str, list[tuple[int, Finding]]]) -> Iterator[Finding]:
    for kind, measured in by_name.items():
        best = max(finding.figures["gflop_per_s"] for _, finding in measured)
        for index, finding in measured:
            if finding.figures["gflop_per_s"] < 0.8 * best:
                value = f"{finding.figures['gflop_per_s'] / best:.0%} of the fastest of its kind ({kind})"
                remedy = (
                    "see nvidia-smi -q -d PERFORMANCE,TEMPERATURE: hot, capped or in use; it will hold the others up"
                )
                yield Finding(f"cuda:{index}", value, Status.WARNING, remedy)


def shortest_s(work: Callable[[], Tensor], device: torch.device, repeats: int = 5) -> float:
    """The shortest of several times that ``work`` takes on ``device``, after one that is not counted."""
    times = []
    for _ in range(1 + repeats):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return min(times[1:])
