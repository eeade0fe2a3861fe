"""When a rank came to what all ranks do together, from torch's flight recorder, whatever the strategy."""

from __future__ import annotations

import json
import math
import zlib
from typing import Any

import torch.distributed as dist

KEPT = 128  # the last collectives of a window
OWN_GROUP = "tracking"  # whose collectives are not looked at


def arrivals(since_ns: int) -> list[float]:
    """Which collectives, as a number, then the times in seconds at which this rank came to them: the last `KEPT`.

    Those after `since_ns` by `time.time_ns`; it must lie at the same place of the program on all ranks.

    They are of the process group that is used most. NaN where nothing is known: the recorder is private to torch, and
    may be off (TORCH_FR_BUFFER_SIZE=0). Costs about 30 microseconds for each entry; the launcher keeps it short.
    """
    unknown = [math.nan] * (KEPT + 1)
    dump = _dump()
    if dump is None or not dist.is_initialized():
        return unknown
    of_groups: dict[str, list[tuple[int, int]]] = {}
    try:
        for entry in json.loads(dump(True, False))["entries"]:
            name, description = entry["process_group"]
            sequence, time_ns = int(entry["collective_seq_id"]), int(entry["time_created_ns"])
            if description != OWN_GROUP and not entry["is_p2p"] and time_ns > since_ns:
                of_groups.setdefault(name, []).append((sequence, time_ns))
    except (KeyError, TypeError, ValueError, RuntimeError):
        return unknown
    name, times = max(of_groups.items(), key=lambda item: len(item[1]), default=("", []))
    last = sorted(times)[-KEPT:]
    if not last:
        return unknown
    # Ranks of other groups, or at other collectives, have another number.
    number = float(zlib.crc32(f"{name} {last[0][0]} {last[-1][0]}".encode()))
    return [number, *(time_ns / 1e9 for _, time_ns in last), *unknown[: KEPT - len(last)]]


def _dump() -> Any:
    try:
        from torch._C import _distributed_c10d
    except ImportError:
        return None
    return getattr(_distributed_c10d, "_dump_fr_trace_json", None)
