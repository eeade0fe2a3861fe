"""Processes that end with the one that started them, also while they import, wait or are stopped; on Linux."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

PR_SET_PDEATHSIG = 1


def end_with_parent(grace_s: float = 1.0) -> None:
    """End this process as soon as the one that started it is gone, its own children before it if they do so in time.

    For the main thread. Where there is no Linux, a pipe that the parent holds tells, and only who reads it.
    """
    if sys.platform != "linux":
        return
    own, parent = os.getpid(), os.getppid()

    def leave(*_: object) -> None:
        # Copies of this process have the handler too; and the kernel tells of a thread of the parent that has ended.
        if os.getpid() != own or os.getppid() == parent:
            return
        end = time.monotonic() + grace_s
        while _has_children() and time.monotonic() < end:
            time.sleep(0.01)
        os._exit(1)

    signal.signal(signal.SIGPWR, leave)  # which nobody else sends
    _signal_at_parents_end(signal.SIGPWR)


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it is gone: it need not run for that."""
    if sys.platform == "linux":
        _signal_at_parents_end(signal.SIGKILL)


def _signal_at_parents_end(number: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(number))


def _has_children() -> bool:
    """Whether one has not ended; the others are forgotten."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True
