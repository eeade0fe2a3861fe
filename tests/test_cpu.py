import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from project.cpu import WAITING, CoresTaken, choose_waiting, share_threads

STAT = """cpu  9 9 9 9 9 9 9 9 9 9
cpu0 100 20 30 4000 50 6 7 8 90 9
cpu1 1 1 1 1000 1 1 1 1 1 1
cpu12 500 0 0 0 0 0 0 0 0 0
intr 17 0 0
"""

PAGE_FAULTS = """
import ctypes, resource, sys
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: huge pages would be few
import numpy as np
from project.cpu import keep_freed_memory
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
        ({"OMP_NUM_THREADS": "2,1"}, "auto", 2, 2),
        ({"OMP_NUM_THREADS": " 3 "}, "auto", 1, 3),
        ({"OMP_NUM_THREADS": "0"}, "auto", 2, 4),
        ({"OMP_NUM_THREADS": "-3"}, "auto", 1, None),
        ({"OMP_NUM_THREADS": "abc", "SLURM_CPUS_PER_TASK": "5"}, "auto", 2, 5),
        ({"SLURM_CPUS_PER_TASK": "x"}, "auto", 2, 4),
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
    assert (int(faults) < 100) is kept  # of 64 MiB: 16,384 pages of 4 KiB


@pytest.fixture
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> Callable[[], dict[str, str]]:
    """An environment that says nothing of how threads wait; what it says afterwards."""
    for name in WAITING:
        monkeypatch.setenv(name, "")  # so that it is as it was after the test
        monkeypatch.delenv(name)
    return lambda: {name: os.environ[name] for name in WAITING if name in os.environ}


def taken(at_s: float, busy_s: float, own_s: float, pid: int = 1) -> CoresTaken:
    return CoresTaken(at_s, busy_s, own_s, pid)


@pytest.mark.parametrize(
    ("start", "now", "decided"),
    [
        (taken(10, 100, 1), taken(10.4, 100.45, 1.4), {"GOMP_SPINCOUNT": "300000"}),  # of others an eighth of a core
        (taken(10, 100, 1), taken(10.4, 100.8, 1.4), {"OMP_WAIT_POLICY": "PASSIVE"}),  # a whole core
        (taken(10, 100, 1, pid=7), taken(10.4, 100.4, 1.4), {"OMP_WAIT_POLICY": "PASSIVE"}),  # in another process
        (taken(10, 100, 1), taken(10, 100, 1), {"OMP_WAIT_POLICY": "PASSIVE"}),  # no time to see anything
        (taken(10, 100, 1), None, {"OMP_WAIT_POLICY": "PASSIVE"}),
        (None, taken(10.4, 100.4, 1.4), {"OMP_WAIT_POLICY": "PASSIVE"}),
    ],
)
def test_idle_threads_spin_only_where_nobody_else_wants_the_cores(
    nothing_set: Callable[[], dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    start: CoresTaken | None,
    now: CoresTaken | None,
    decided: dict[str, str],
) -> None:
    monkeypatch.setattr(CoresTaken, "until_now", lambda with_parent: now)
    choose_waiting(start)
    assert nothing_set() == decided
    choose_waiting(None)  # in a process that it starts
    assert nothing_set() == decided


@pytest.mark.parametrize("name", WAITING)
def test_what_the_user_says_of_idle_threads_stands(
    nothing_set: Callable[[], dict[str, str]], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "theirs")
    choose_waiting(None)
    assert nothing_set() == {name: "theirs"}


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="this system does not tell what its cores do")
def test_work_of_usable_cores_is_read_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda _: STAT)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 12})
    monkeypatch.setattr(os, "sysconf", lambda _: 100)
    read = CoresTaken.until_now()
    assert read is not None
    assert read.busy_s == pytest.approx((100 + 20 + 30 + 6 + 7 + 8 + 500) / 100)


BUSY_PARENT = """
import subprocess, sys, time
child = "import sys, time; from project.cpu import CoresTaken as C; b = C.until_now(sys.argv[1] == 'yes')\\n"
child += "time.sleep(1)\\nprint(C.until_now(sys.argv[1] == 'yes').own_s - b.own_s)"
child = subprocess.Popen([sys.executable, "-c", child, sys.argv[1]])
while child.poll() is None:
    pass
"""


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="this system does not tell what its cores do")
@pytest.mark.slow
@pytest.mark.parametrize("asked", ["yes", "no"])
def test_what_the_parent_takes_counts_as_own_where_it_is_asked_for(asked: str) -> None:
    told = subprocess.run([sys.executable, "-c", BUSY_PARENT, asked], capture_output=True, text=True, check=True).stdout
    # The parent does nothing but ask whether its child has ended: less than a whole core where others want it too.
    assert (float(told) > 0.1) == (asked == "yes")


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="this system does not tell what its cores do")
def test_a_busy_process_beside_this_one_is_seen() -> None:
    before = CoresTaken.until_now()
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.5)
        now = CoresTaken.until_now()
    finally:
        busy.kill()
        busy.wait()
    assert before is not None
    assert now is not None
    assert now.of_others(before) > 0.25
