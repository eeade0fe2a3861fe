"""Ctrl-C while a command still imports its modules, before anything of it could catch that; and imports that fail."""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType

from project.launch import hidden_modules

NOTHING_WRITTEN = "Interrupted before the run began; nothing was written."

_theirs = sys.excepthook


def is_command(program: str) -> bool:
    """Whether Python runs a command of this project (``sys.argv[0]``), and not a program that imports it."""
    path, package = Path(program), Path(__file__).parents[1]
    return path.name.startswith(f"{package.name.replace('_', '-')}-") or path.resolve().parent == package


def begin() -> None:
    """Tell Ctrl-C in a sentence, not by where in the imports it came."""
    if is_command(sys.argv[0]):
        sys.excepthook = _tell


def end() -> None:
    """From here on the command line catches it."""
    if sys.excepthook is _tell:
        sys.excepthook = _theirs


def _tell(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        print(f"\n{NOTHING_WRITTEN}", file=sys.stderr)
    else:
        _theirs(kind, error, traceback)
        if text := hidden_modules.told(error):
            print(f"error: {text}", file=sys.stderr)
