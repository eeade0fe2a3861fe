"""Workers of a loader: what signals mean to them, and what is told when one dies."""

import multiprocessing
import re
import signal
import sys
import threading
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import wait
from multiprocessing.util import Finalize
from types import TracebackType
from typing import Any, Protocol
from weakref import WeakSet

from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

LOOK_EVERY_S = 0.5  # for workers that have died, while the training waits for a batch; torch's is 5
GONE_WITHIN_S = 5.0  # after its connection broke


class LostWorkerError(ValueError):
    """A sentence; see `lost_worker`."""


class Read(Protocol):
    """A dataset that knows what each process reads of it."""

    def read_by(self, process_ids: set[int]) -> str:
        """Ends a sentence: ` while sample 7 of Digits was read`; empty where none of these processes read anything."""
        ...


READ: WeakSet[Any] = WeakSet()  # what workers read: where torch names a process, and no loader

# What torch says of a worker that is gone, wherever the training process is when it notices.
_DIED = re.compile(r"DataLoader worker \(pid(?:\(s\))? (?P<pids>[\d, ]+)\) (?P<how>[^.]*)")

_HINTS = {
    "Killed": "killed, as Linux does where memory runs out: type fewer data.num_workers, or a smaller data.batch_size",
    "Bus error": "shared memory ran out: type fewer data.num_workers, or give /dev/shm more room",
}


def lost_worker(text: str, cause: str | None = None) -> str | None:
    """A sentence in place of torch's text of a worker that died, with the samples it was on; None for other texts.

    `cause` is the name of a signal or an exit code, where it is known better than torch does.
    """
    found = _DIED.match(text)
    if found is None:
        return None
    process_ids = {int(number) for number in found["pids"].split(",")}
    where = next((named for read in READ if (named := read.read_by(process_ids))), "")
    cause = cause or found["how"].removeprefix("is killed by signal: ").strip()
    hint = _HINTS.get(cause, f"{cause}: type data.num_workers=0, which shows an error of its own with its traceback")
    return f"a worker of the loader died{where} ({hint})"


class WorkersIterator(_MultiProcessingDataLoaderIter):
    """The batches of workers, of which one that has died is told of where a batch is waited for.

    torch tells of it out of a signal's handler too, wherever the process is by then: also in the middle of what ends a
    run or an epoch in its order.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        had_handler = signal_handling._SIGCHLD_handler_set
        before = signal.getsignal(signal.SIGCHLD) if hasattr(signal, "SIGCHLD") else None
        super().__init__(loader)
        if signal_handling._SIGCHLD_handler_set and not had_handler:
            _restore(signal.SIG_DFL if before is None else before)

    def _try_get_data(self, timeout: float = LOOK_EVERY_S) -> tuple[bool, Any]:
        try:
            got: tuple[bool, Any] = super()._try_get_data(timeout)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            text = lost_worker(str(error), self._cause())
            if text is None:
                raise
            raise LostWorkerError(text) from error
        except (EOFError, ConnectionError) as error:  # a batch lies in memory that its worker must hand over
            raise LostWorkerError(self._lost()) from error
        except FileNotFoundError as error:  # so it does, and its worker has ended in order, by SystemExit for one
            text = self._lost()
            if not self._ended():
                raise
            raise LostWorkerError(text) from error
        return got

    def _get_data(self) -> Any:
        try:
            return super()._get_data()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            # Where batches are pinned, a thread takes them from the workers, and does not outlive what fails there.
            if "Pin memory thread exited" not in str(error):
                raise
            text = self._lost()
            if text is None or not self._ended():
                raise
            raise LostWorkerError(text) from error

    def _lost(self) -> str | None:
        """The sentence of a worker that is about to end."""
        ending = wait([worker.sentinel for worker in self._workers], timeout=GONE_WITHIN_S)
        for worker in self._workers:
            if worker.sentinel in ending:
                worker.join(GONE_WITHIN_S)  # its exit code comes a moment after its sentinel
        gone = self._ended() or self._workers
        return lost_worker(f"DataLoader worker (pid(s) {', '.join(str(w.pid) for w in gone)}) is gone", self._cause())

    def _ended(self) -> list[Any]:
        """The workers that are gone, while all are wanted: with code 0, too, which a KeyboardInterrupt leaves."""
        return [worker for worker in self._workers if worker.exitcode is not None]

    def _cause(self) -> str | None:
        codes = [worker.exitcode for worker in self._ended()]
        if not codes:
            return None
        return signal.strsignal(-codes[0]) if codes[0] < 0 else f"exit code {codes[0]}"


def let_workers_end() -> None:
    """Let torch no longer raise where a worker has died, until a loader of others starts some again."""
    if signal_handling._SIGCHLD_handler_set and threading.current_thread() is threading.main_thread():
        _restore(signal.SIG_DFL)


def _restore(handler: Any) -> None:
    signal.signal(signal.SIGCHLD, handler)
    signal_handling._SIGCHLD_handler_set = False


def start_worker(then: Callable[[int], None] | None, worker: int) -> None:
    """Let the training process alone decide what a signal to the whole run means: it still wants its batches."""
    for name in ("SIGINT", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name, signal.SIGINT), signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))  # a second one ends it
    sys.excepthook = _unless_left_alone
    if then is not None:
        then(worker)


def _unless_left_alone(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """A thread that hands out batches may find the training gone, which has told why."""
    if not issubclass(kind, ConnectionError | EOFError):
        sys.__excepthook__(kind, error, traceback)


@cache
def end_workers_at_exit(process_id: int) -> None:
    """Let no worker keep this process from ending, which waits for those whose loader an error still holds on to.

    It sends each SIGTERM first, but a worker takes the first one for one to the whole run.
    """
    Finalize(None, _end_workers, exitpriority=0)


def _end_workers() -> None:
    let_workers_end()
    for worker in multiprocessing.active_children():
        if worker.daemon:
            worker.kill()
