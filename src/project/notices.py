"""What a run tells its user besides results and errors."""

import re
import sysconfig
import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from project.errors import full_tracebacks


class Notice(UserWarning):
    """A sentence for the user; where it comes from does not matter to them."""


def notice(text: str) -> None:
    """Tell it once, from rank 0; a warning, which can be filtered as any other."""
    rank_zero_warn(text, category=Notice)


# What libraries say at length, as regular expressions, and what to read instead.
_IN_OUR_WORDS = {
    r"It is recommended to use `self\.log\('(.+)', \.\.\., sync_dist=True\)`": (
        r'each rank logs \1 of its own part of the data: pass sync_dist=True to self.log("\1", ...) for all of it'
    ),
    r"Trying to infer the `batch_size` .* found is (\d+)\..*": (
        r"self.log takes a batch for \1 samples, by the first tensor in it: if that is wrong, pass it batch_size="
    ),
    r"This DataLoader will create (\d+) worker processes in total\. .* in current system is (\d+),.*": (
        r"a loader starts \1 workers where \2 are of use: type data.num_workers=\2"
    ),
    r"Using `DistributedSampler` with the dataloaders.*": (
        "loaders of your own are shared out in equal parts, so some samples count twice in validation and test: "
        "evaluate with trainer.devices=1, or build on project.data.DataModule"
    ),
    r"Attribute '(.+)' is an instance of `nn\.Module` .*": (
        r'save_hyperparameters() stores \1, whose weights are in the checkpoint anyway: pass it ignore=["\1"]'
    ),
}

_OF_LIBRARIES = (*{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}, str(Path(__file__).parent))


def show_warnings_plainly() -> None:
    """Let a warning be one line: without the code that it came from, and of a library without file and line.

    A notice is its sentence alone. With HYDRA_FULL_ERROR=1 other warnings are as they were.
    """
    theirs = warnings.formatwarning
    if getattr(theirs, "is_plain", False):
        return

    def formatted(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        if issubclass(category, Notice):
            return f"{message}\n"
        if full_tracebacks():
            return theirs(message, category, filename, lineno, line)
        text = " ".join(str(message).split())
        for pattern, ours in _IN_OUR_WORDS.items():
            if found := re.match(pattern, text):
                text = found.expand(ours)
        place = "" if filename.startswith(_OF_LIBRARIES) else f" ({filename}:{lineno})"
        return f"warning: {text}{place}\n"

    plain: Any = formatted
    plain.is_plain = True
    warnings.formatwarning = plain
