"""Workers of a loader, at the end of a process that an error ends."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from project.data import workers
from project.data.loaders import evaluation_loader
from project.data.workers import LostWorkerError, WorkersIterator, lost_worker

FAILS = """
from project.data.loaders import evaluation_loader

class Bad:
    def __len__(self): return 8
    def __getitem__(self, index): return index

iterator = iter(evaluation_loader(Bad(), list, 2, None, num_workers=2, persistent_workers=True))
next(iterator)
print("read", flush=True)
raise SystemExit(3)
"""

DIES = """
import os, signal
from project.data.loaders import evaluation_loader
from project.data.workers import LostWorkerError

class Bad:
    def __len__(self): return 8
    def __getitems__(self, indices):
        if 5 in indices: {dies_by}
        return indices

before = signal.getsignal(signal.SIGCHLD)
try:
    list(evaluation_loader(Bad(), list, 2, None, num_workers=2))
except LostWorkerError as error:
    print(error)
assert signal.getsignal(signal.SIGCHLD) == before  # torch's would raise wherever this process is
"""


@pytest.mark.slow
def test_workers_that_are_still_there_do_not_keep_a_process_from_ending() -> None:
    # A name of the module holds on to the iterator, as the traceback of an error does.
    done = subprocess.run([sys.executable, "-c", FAILS], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (3, "read\n"), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dies_by", "told"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed, as Linux does where memory runs out"),
        ("os._exit(7)", "exit code 7: type data.num_workers=0"),
        ("raise SystemExit(4)", "exit code 4: type data.num_workers=0"),
        ("raise KeyboardInterrupt", "exit code 0: type data.num_workers=0"),
    ],
)
def test_what_a_worker_read_that_died_is_told(dies_by: str, told: str) -> None:
    code = DIES.format(dies_by=dies_by)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert done.stdout.startswith("a worker of the loader died while one of the samples 4, 5 of Bad was read ("), (
        done.stderr
    )
    assert told in done.stdout
    assert done.returncode == 0
    assert done.stderr == ""


def test_loaders_of_others_are_told_of_without_a_sample() -> None:
    killed = "DataLoader worker (pid 17) is killed by signal: Killed. "
    assert lost_worker(killed) == (
        "a worker of the loader died (killed, as Linux does where memory runs out: type fewer data.num_workers, or a "
        "smaller data.batch_size)"
    )
    several = lost_worker("DataLoader worker (pid(s) 17, 18) exited unexpectedly")
    assert several is not None
    assert several.startswith("a worker of the loader died (exited unexpectedly: type data.num_workers=0")
    assert lost_worker("Caught RuntimeError in DataLoader worker process 0.") is None


@pytest.mark.parametrize(
    ("exit_code", "error", "told"),
    [
        (-9, LostWorkerError, "^a worker of the loader died .killed, as Linux does"),
        (None, RuntimeError, "^Pin memory thread exited"),
    ],
)
def test_the_thread_that_pins_batches_tells_of_a_worker_that_died(
    exit_code: int | None, error: type[Exception], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where that thread meets what is left of the worker, and ends."""

    def fail(iterator: Any) -> NoReturn:
        raise RuntimeError("Pin memory thread exited unexpectedly")

    monkeypatch.setattr(_MultiProcessingDataLoaderIter, "_get_data", fail)
    monkeypatch.setattr(workers, "wait", lambda *_, **__: [])
    monkeypatch.setattr(_MultiProcessingDataLoaderIter, "__del__", lambda _: None)
    iterator: Any = WorkersIterator.__new__(WorkersIterator)
    iterator._workers = [SimpleNamespace(pid=7, exitcode=exit_code, sentinel=0)]
    with pytest.raises(error, match=told):
        iterator._get_data()


@pytest.mark.parametrize(
    ("exit_code", "error", "told"),
    [(0, LostWorkerError, "exit code 0"), (4, LostWorkerError, "exit code 4"), (None, FileNotFoundError, "no such")],
)
def test_a_worker_that_left_in_order_with_a_batch_is_told_of(
    exit_code: int | None, error: type[Exception], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes with it the socket at which its batch was to be fetched."""

    def fail(*_: Any) -> NoReturn:
        raise FileNotFoundError("no such file")

    monkeypatch.setattr(_MultiProcessingDataLoaderIter, "_try_get_data", fail)
    worker = SimpleNamespace(pid=7, exitcode=None, sentinel=0)
    worker.join = lambda *_: setattr(worker, "exitcode", exit_code)  # known a moment after the sentinel tells
    monkeypatch.setattr(workers, "wait", lambda *_, **__: [] if exit_code is None else [0])
    monkeypatch.setattr(_MultiProcessingDataLoaderIter, "__del__", lambda _: None)
    iterator: Any = WorkersIterator.__new__(WorkersIterator)
    iterator._workers = [worker]
    with pytest.raises(error, match=told):
        iterator._try_get_data()


class Ends:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise StopIteration
        return index


def test_a_sample_that_raises_stop_iteration_does_not_end_the_epoch() -> None:
    with pytest.raises(RuntimeError, match="StopIteration was raised while sample 5 of Ends was read"):
        list(evaluation_loader(Ends(), list, 2, None))
