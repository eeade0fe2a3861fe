import os
import platform
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from project.launch.cpu import share_threads

PAGE_FAULTS = """
import resource, sys
import numpy as np
from project.launch.cpu import keep_freed_memory
kept = keep_freed_memory()
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(2**26, dtype=np.uint8)
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int | None]:
    """The number of threads that was set, on a host of 8 cores; None where none was."""
    given: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    for name in ("OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK"):
        monkeypatch.delenv(name, raising=False)
    return lambda: given[-1] if given else None


@pytest.mark.parametrize(
    ("environment", "typed", "ranks", "expected"),
    [
        ({}, "auto", 1, None),
        ({}, "auto", 2, 4),
        ({}, "auto", 3, 2),
        ({}, "auto", 16, 1),
        ({"OMP_NUM_THREADS": "3"}, "auto", 2, 3),
        ({"SLURM_CPUS_PER_TASK": "5"}, "auto", 2, 5),
        ({"OMP_NUM_THREADS": "3", "SLURM_CPUS_PER_TASK": "5"}, "auto", 1, 3),
        ({"OMP_NUM_THREADS": "3"}, 6, 2, 6),
        ({}, "6", 1, 6),
    ],
)
def test_cores_are_shared_out_unless_told_otherwise(
    threads: Callable[[], int | None],
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    typed: int | str,
    ranks: int,
    expected: int | None,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    share_threads(typed, ranks)
    assert threads() == expected


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no mallopt")
@pytest.mark.parametrize(("environment", "kept"), [({}, True), ({"MALLOC_MMAP_THRESHOLD_": "1048576"}, False)])
def test_freed_memory_is_taken_again_without_page_faults(environment: dict[str, str], kept: bool) -> None:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    output = subprocess.check_output([sys.executable, "-c", PAGE_FAULTS], text=True, env=inherited | environment)
    said, faults = output.split()
    assert said == str(kept)
    assert (int(faults) < 100) is kept  # of 64 MiB: 16,384 pages of 4 KiB; fewer where they are huge
