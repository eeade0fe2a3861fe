"""A process that trains alone looks after itself: it ends where it hangs, and when it has to."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from project.launch.agent import RankError
from project.launch.heartbeat import BEAT, Sign, describe_hang
from project.launch.stopping import REQUEST, Stopped

LOOK_EVERY_S = 0.2
UNWIND_S = 3  # for what ends a run in its order, with the loader's workers, each of which torch waits 5 s for


@contextmanager
def watched(launch: dict[str, Any], log: Path, tell: Callable[[BaseException], None]) -> Iterator[None]:
    """End a training that shows no progress for ``launch.hang_timeout_s``, or has not ended ``launch.grace_s`` after a
    signal, or at a second Ctrl-C: by an error where it is, and, where that does not end it in time, altogether.

    Several ranks are watched by the process that started them. What holds the interpreter's lock can't be ended so.

    Args:
        launch: The group of the config.
        log: What gets the stacks of all threads.
        tell: Says and notes why a run ends, as if the error had been raised; before the process ends altogether.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # which alone a signal reaches
        return
    over = threading.Event()
    BEAT.start_alone()
    watch = threading.Thread(target=_look, args=(launch, log, tell, over), name="watch", daemon=True)
    watch.start()
    try:
        yield
    finally:
        over.set()
        BEAT.end()


def _look(launch: dict[str, Any], log: Path, tell: Callable[[BaseException], None], over: threading.Event) -> None:
    grace_s, hang_timeout_s = launch["grace_s"], launch["hang_timeout_s"]
    asked_at: float | None = None
    error: BaseException | None = None
    while error is None:
        if over.wait(LOOK_EVERY_S):
            return
        if REQUEST.signum and asked_at is None:
            asked_at = time.monotonic()
        if REQUEST.has_insisted:
            error = KeyboardInterrupt()  # has been raised
        elif asked_at is not None and time.monotonic() - asked_at > grace_s:
            error = Stopped(REQUEST.signum)
            print(
                f"the run did not come to the end of a step within launch.grace_s={grace_s:g} of "
                f"{signal.Signals(REQUEST.signum).name}, and is ended: its last checkpoint stands",
                file=sys.stderr,
                flush=True,
            )
            if REQUEST.deferred:
                REQUEST.deferred = False
                os.kill(os.getpid(), REQUEST.signum)
        elif (hung := _late(hang_timeout_s)) and not _is_debugged():
            with log.open("a") as file:
                faulthandler.dump_traceback(file, all_threads=True)
            error = REQUEST.failure = RankError(describe_hang(hung[0], hung, is_stopped=False))
            os.kill(os.getpid(), signal.SIGTERM)
    if over.wait(UNWIND_S):
        return
    with suppress(BaseException):
        tell(error)
    for worker in multiprocessing.active_children():
        worker.kill()
    os._exit(128 + REQUEST.signum if REQUEST.signum else 1)


def _late(hang_timeout_s: float | None) -> list[Sign]:
    return [] if hang_timeout_s is None else [sign for sign in BEAT.signs() if sign.age_s > hang_timeout_s]


def _is_debugged() -> bool:
    """Whether somebody looks at the training with a debugger, and takes the time."""
    frames = traceback.walk_stack(sys._current_frames().get(threading.main_thread().ident or 0))
    return "pydevd" in sys.modules or any(frame.f_globals.get("__name__") in ("pdb", "bdb") for frame, _ in frames)
