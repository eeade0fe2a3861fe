"""What became of a run: ``state.json`` in its folder, there from its start, true even after it was killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from project.errors import UserError, sentence
from project.files import write_whole
from project.launch.stopping import Stopped

FILE = "state.json"


@dataclass(frozen=True)
class RunState:
    """``state`` is running, finished, failed, interrupted or killed; times are in seconds since 1970.

    ``trained`` says whether there was a step of training.
    """

    state: str
    started_at: float
    ended_at: float | None = None
    host: str = ""
    pid: int = 0
    error: str | None = None
    trained: bool = False

    @property
    def duration_s(self) -> float | None:
        """Seconds from start to end, up to now while it runs; None where nobody saw it end."""
        end = time.time() if self.state == "running" else self.ended_at
        return None if end is None else end - self.started_at


@contextmanager
def recorded(folder: Path, begins: bool = True) -> Iterator[None]:
    """Note that a run begins in ``folder``, and how it ended.

    Of ranks that share a folder one ``begins`` the run, and may have removed it by now. The first that fails says why.

    Raises:
        UserError: what the run failed with, where its folder has been taken away meanwhile.
    """
    if begins:
        _write(folder, RunState("running", time.time(), None, socket.gethostname(), os.getpid()))
    try:
        yield
    except BaseException as error:
        if begins and isinstance(error, Exception) and not (folder / FILE).exists():
            raise UserError(
                f"{folder} is gone: it was removed, or moved while the run wrote into it; begin anew, or type "
                "resume=FOLDER with where it lies now"
            ) from error
        if begins or folder.exists():
            record_failure(folder, error)
        raise
    if begins:
        record_success(folder)


def record_first_step(folder: Path) -> None:
    """Note that the run in ``folder``, if there is one, has trained."""
    known = read(folder)
    if known is not None and known.state == "running":
        _write(folder, replace(known, trained=True))


def record_failure(folder: Path, error: BaseException) -> None:
    """Note why a run failed, or was interrupted, unless that is known; it may not have had a folder yet."""
    known = read(folder)
    if known is None or known.state == "running":
        folder.mkdir(parents=True, exist_ok=True)
        interrupted = isinstance(error, KeyboardInterrupt | SystemExit)
        _end(folder, "interrupted" if interrupted else "failed", reason(error))


def record_success(folder: Path) -> None:
    """Note that a run has ended well."""
    _end(folder, "finished")


def read(folder: Path) -> RunState | None:
    """The state of the run in ``folder``; None where no run began. One whose process is gone was killed."""
    try:
        found = RunState(**json.loads((folder / FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    if found.state == "running" and found.host == socket.gethostname() and not _is_alive(found):
        return RunState("killed", found.started_at, None, found.host, found.pid, "its process is gone")
    return found


def reason(error: BaseException) -> str:
    """Why a run failed, in a line: our sentence, or the last line of what was said; of a signal its name."""
    if isinstance(error, KeyboardInterrupt | Stopped):
        return f"stopped by {signal.Signals(getattr(error, 'signum', signal.SIGINT)).name}"
    lines = [line.strip() for line in (sentence(error) or str(error)).splitlines() if line.strip()]
    text = lines[-1] if lines else ""
    named = type(error).__name__
    return text if sentence(error) or named == "RankError" else f"{named}: {text}" if text else named


def _end(folder: Path, state: str, error: str | None = None) -> None:
    now = time.time()
    begun = read(folder) or RunState(state, now, now, socket.gethostname(), os.getpid())
    _write(folder, replace(begun, state=state, ended_at=now, error=error))


def _write(folder: Path, state: RunState) -> None:
    with suppress(OSError):  # a full disk: what is told in the file must not hide what happened
        write_whole(folder / FILE, json.dumps(asdict(state), indent=2) + "\n")


def _is_alive(state: RunState) -> bool:
    try:
        # A later process may have got the number.
        return psutil.Process(state.pid).create_time() <= state.started_at
    except psutil.Error:
        return False
