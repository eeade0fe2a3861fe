"""Files that are whole or absent, whoever reads them meanwhile and however their writer ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """A file to write, which takes the name ``path`` at the end of the block; an error leaves nothing of it."""
    written = path.with_name(f"{path.name}.{os.urandom(4).hex()}.tmp")  # several hosts may write the same file
    try:
        yield written
        written.replace(path)
    except BaseException:
        written.unlink(missing_ok=True)
        raise


def write_whole(path: Path, text: str) -> None:
    """Write a text as ``beside`` does."""
    with beside(path) as written:
        written.write_text(text)
