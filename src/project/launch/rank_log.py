"""What a rank prints: in a log of its own, and rank 0's on the console too."""

from __future__ import annotations

import logging
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO, cast

from project.launch.console import lasting, raw
from project.launch.full_disk import SparedStream
from project.launch.quiet import quiet_libraries


def log_path(folder: Path, rank: int) -> Path:
    return folder / "ranks" / f"rank_{rank}.log"


@contextmanager
def rank_log(folder: Path, rank: int, own_console: bool, tell_errors: bool = False) -> Iterator[None]:
    """Keep the rank's output in ``<folder>/ranks/rank_N.log``; rank 0's goes to the console as well, as it is.

    With ``tell_errors`` the other ranks' errors reach the console too: where no launcher collects them.
    """
    quiet_libraries()
    path = log_path(folder, rank)
    path.parent.mkdir(exist_ok=True)
    if not own_console:
        # The process is this rank's alone: its file descriptors are turned over for good, so that what C++
        # libraries print arrives in the log too.
        console = os.dup(2)
        with path.open("ab") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        sys.stdout, sys.stderr = (cast("TextIO", SparedStream(stream)) for stream in (sys.stdout, sys.stderr))
        try:
            yield
        except Exception:
            traceback.print_exc()
            if tell_errors:
                os.write(console, f"rank {rank} failed:\n{traceback.format_exc()}".encode())
            raise
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
        return
    stdout, stderr = sys.stdout, sys.stderr
    with path.open("a", buffering=1) as file:
        spared = cast("TextIO", SparedStream(file))
        own = Tee(lasting(stdout), spared), Tee(lasting(stderr), spared)
        tees = cast("tuple[TextIO, TextIO]", own)
        sys.stdout, sys.stderr = tees
        _redirect_loggers((stdout, stderr, raw(stdout), raw(stderr)), tees * 2)
        try:
            yield
        except Exception:
            for tee in own:
                tee.finish()
            spared.write(traceback.format_exc())
            raise
        finally:
            for tee in own:
                tee.finish()
            sys.stdout, sys.stderr = stdout, stderr
            _redirect_loggers(tees, (stdout, stderr))


def _redirect_loggers(before: tuple[TextIO, ...], after: tuple[TextIO, ...]) -> None:
    """Logging handlers hold on to the console that was there when they were made."""
    for name in ("", "lightning", "lightning.pytorch", "lightning.fabric"):
        for handler in logging.getLogger(name).handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream in before:
                handler.setStream(after[before.index(handler.stream)])


CURSOR_UP = re.compile(r"\x1b\[(\d*)A")


class Tee:
    """A console that is also written to a log: whole lines, without the bar's redrawings and colours."""

    def __init__(self, console: TextIO, log: TextIO) -> None:
        self._console = console
        self._log = log
        self._line = ""
        self._redrawn: list[str] = []  # lines of a bar of several lines, until they are drawn anew or left alone
        self._num_to_redraw = 0

    def write(self, text: str) -> int:
        self._line += text
        *lines, self._line = self._line.split("\n")
        for line in lines:
            self._end(line)
        self._line = self._line.rpartition("\r")[2]
        return self._console.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def finish(self) -> None:
        """Log what is still held back."""
        if self._line:
            self._end(self._line)
        self._line = ""
        self._log.writelines(self._redrawn)
        self._redrawn = []

    def _end(self, line: str) -> None:
        last_drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).rstrip("\r").rpartition("\r")[2]
        if line.strip("\r") and not last_drawn.strip():
            return
        # rich goes up over all lines of its bars and draws each again.
        lines_up = sum(int(number or 1) for number in CURSOR_UP.findall(line))
        if lines_up:
            self._num_to_redraw, self._redrawn = lines_up, []
        if self._num_to_redraw:
            self._num_to_redraw -= 1
            self._redrawn.append(last_drawn + "\n")
        else:
            self._log.writelines([*self._redrawn, last_drawn + "\n"])
            self._redrawn = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._console, name)
