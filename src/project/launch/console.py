"""The console may be closed, or read by ``head`` that has seen enough: what is printed is lost, and nothing else."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

STREAMS = ("stdin", "stdout", "stderr")


@contextmanager
def lasting_console() -> Iterator[None]:
    """What this process prints may have nowhere to go."""
    for number, name in enumerate(STREAMS):
        _open(number, name)
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(lasting, before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def lasting(stream: TextIO) -> TextIO:
    """The stream, which leads nowhere from the first write that fails on."""
    return cast("TextIO", _Lasting(stream))


def raw(stream: TextIO) -> TextIO:
    """The stream that ``lasting`` was given, or this one."""
    return stream._stream if isinstance(stream, _Lasting) else stream


def _open(number: int, name: str) -> None:
    try:
        os.fstat(number)
    except OSError:  # closed, as by >&-: the next file that is opened would be taken for the console
        os.open(os.devnull, os.O_RDWR)  # it gets the lowest number that is free
        os.set_inheritable(number, True)
    if getattr(sys, name) is None:
        setattr(sys, name, open(number, "r" if name == "stdin" else "w", closefd=False))  # noqa: SIM115


class _Lasting:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with self._may_go():
            self._stream.write(text)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with self._may_go():
            self._stream.flush()

    @contextmanager
    def _may_go(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            with suppress(OSError, ValueError):  # else what is in its buffer would be an error when the process ends
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
