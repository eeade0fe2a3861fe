"""Errors that the user caused, and how they are told."""

import difflib
import dis
import os
from collections.abc import Iterable


class UserError(Exception):
    """What was given, what is allowed and what to type, in one sentence; shown without a traceback."""


def nearest(name: str, allowed: Iterable[str]) -> str | None:
    """The allowed name that looks most like ``name``, or None where none comes near."""
    matches = difflib.get_close_matches(name, list(allowed), n=1, cutoff=0.6)
    return matches[0] if matches else None


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """``": did you mean X?"``, or nothing where no allowed name comes near."""
    match = nearest(name, allowed)
    return f": did you mean {match}?" if match else ""


def sentence(error: BaseException) -> str | None:
    """The text of an error that the user caused; None for any other, which needs its traceback.

    Data modules and models know nothing of ``UserError``: a ``ValueError`` that is raised by this package's own
    code (not by a library that it calls) is a sentence too, and so is Lightning's ``MisconfigurationException``.
    """
    if isinstance(error, UserError) or type(error).__name__ == "MisconfigurationException":
        return str(error)
    if isinstance(error, ValueError) and error.__traceback__ is not None:
        last = error.__traceback__
        while last.tb_next is not None:
            last = last.tb_next
        code, package = last.tb_frame.f_code, __name__.partition(".")[0]
        ours = last.tb_frame.f_globals.get("__name__", "").partition(".")[0] == package
        # int("x") or a wrong unpacking in our code is a bug, though its last frame is ours: there nothing says raise.
        if ours and dis.opname[code.co_code[last.tb_lasti]] == "RAISE_VARARGS":
            return str(error)
    return None


FULL_ERROR = "HYDRA_FULL_ERROR"


def full_tracebacks() -> bool:
    """Whether the user asked for tracebacks with HYDRA_FULL_ERROR=1."""
    return os.environ.get(FULL_ERROR) == "1"
