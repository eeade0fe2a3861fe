"""A full disk costs a run points of its curves and lines of its logs, not its training."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from typing import Any, TextIO

FULL = (errno.ENOSPC, errno.EDQUOT)


def spare_curves() -> None:
    """Let TensorBoard's writers drop what does not fit, whole records at a time, and go on when there is room again.

    They would end the process, or leave half a record, after which nothing of the file can be read.
    """
    from tensorboard.compat.tensorflow_stub.io.gfile import LocalFileSystem

    write = LocalFileSystem._write
    if hasattr(write, "__wrapped__"):
        return

    @functools.wraps(write)
    def spared(self: Any, filename: Any, file_content: Any, mode: str) -> None:
        size = os.path.getsize(filename) if "a" in mode and os.path.exists(filename) else 0  # noqa: PTH110, PTH202
        try:
            write(self, filename, file_content, mode)
        except OSError as error:
            if error.errno not in FULL:
                raise
            with contextlib.suppress(OSError):
                os.truncate(filename, size)
            _warn_once(os.path.dirname(filename))  # noqa: PTH120

    LocalFileSystem._write = spared


@functools.cache
def _warn_once(folder: str) -> None:
    from project.notices import notice

    notice(f"The disk is full: points of the curves in {folder} are left out until there is room again")


class SparedStream:
    """A stream that drops what can't be written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
