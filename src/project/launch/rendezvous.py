"""Where ranks find each other, and how long their groups wait."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore, distributed_c10d  # type: ignore[attr-defined]

PATIENCE_S = 20.0  # of rank 0; the others have more, so that as a rule one tells it


def own_store(timeout: timedelta) -> Store | None:
    """The part of torchrun's store that belongs to this start of the ranks; None where torch makes a store anew.

    torchrun keeps one store for all starts, and ranks that start again would look for those that died, by the addresses
    that these have left in it. On several hosts the starts are counted by each, and not alike.
    """
    is_kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if not is_kept or world_size != int(os.environ["LOCAL_WORLD_SIZE"]):
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, world_size, is_master=False, timeout=timeout)
    return PrefixStore(f"start_{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)


@contextmanager
def default_timeout(timeout: timedelta) -> Iterator[None]:
    """Let every group wait so long, whoever makes it: those of a mesh and of a library take torch's default."""
    names = ("default_pg_timeout", "default_pg_nccl_timeout")
    before = {name: getattr(distributed_c10d, name) for name in names}
    for name in names:
        setattr(distributed_c10d, name, timeout)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(distributed_c10d, name, value)


@contextmanager
def waiting_told(rank: int, world_size: int, patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Say, where ranks have not found each other after a while, what they wait for and what may be wrong; wait on."""
    text = (
        f"Rank {rank} of {world_size} still waits for the others at {os.environ['MASTER_ADDR']}:"
        f"{os.environ['MASTER_PORT']}. If nobody started them, torchrun's variables are left over: type unset "
        "TORCHELASTIC_RUN_ID RANK LOCAL_RANK WORLD_SIZE. Else that address may be out of reach: on one host, see "
        "whether ip link shows lo as up"
    )
    wait_s = patience_s if rank == 0 else 3 * patience_s
    timer = threading.Timer(wait_s, lambda: print(text, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
