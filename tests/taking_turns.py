"""Several workers (``pytest -n 2``): which tests keep together, and which run while all others wait."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

# Held by a worker that waits for its turn, so that nobody overtakes one that needs the machine for itself; and by
# those whose turn it is. Files that are there anyway leave nothing behind.
QUEUE, MACHINE = Path(__file__), Path(__file__).with_name("conftest.py")


def share_out(items: list[pytest.Item]) -> None:
    """Keep what shares a cluster or trained models on one worker, and begin with what takes long."""
    for item in items:
        together = "slurm" if "slurm" in getattr(item, "fixturenames", ()) else str(item.path)
        item.add_marker(pytest.mark.xdist_group(together))
    if is_worker():
        items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@contextmanager
def turn(item: pytest.Item) -> Iterator[None]:
    """Run beside the tests of other workers, or, if it is marked ``alone``, beside none."""
    if not is_worker():
        yield
        return
    alone = item.get_closest_marker("alone") is not None
    with QUEUE.open() as queue, MACHINE.open() as machine:
        fcntl.flock(queue, fcntl.LOCK_EX)
        fcntl.flock(machine, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(queue, fcntl.LOCK_UN)
        yield


def is_worker() -> bool:
    """Whether this is one of several pytest processes."""
    return "PYTEST_XDIST_WORKER" in os.environ
