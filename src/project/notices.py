"""What a run tells its user besides results and errors."""

import warnings
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn


class Notice(UserWarning):
    """A sentence for the user; where it comes from does not matter to them."""


def notice(text: str) -> None:
    """Tell it once, from rank 0; a warning, which can be filtered as any other."""
    rank_zero_warn(text, category=Notice)


def show_notices_plainly() -> None:
    """Let a notice be the sentence alone, without the file and the line that Python puts around it."""
    theirs = warnings.formatwarning
    if getattr(theirs, "shows_notices", False):
        return

    def formatted(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> str:
        return f"{message}\n" if issubclass(category, Notice) else theirs(message, category, *where, **more)

    formatted.shows_notices = True  # type: ignore[attr-defined]
    warnings.formatwarning = formatted
