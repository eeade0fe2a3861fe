"""A file of the user's that Python imports instead of a module of its own, or of a library."""

from __future__ import annotations

import sys
from pathlib import Path

LIBRARIES = ("torch", "numpy", "lightning", "hydra", "omegaconf", "torchmetrics", "torchdata", "tensorboard", "rich")


def told(error: BaseException) -> str | None:
    """A sentence where an import failed, or a name in a module, and a file of the working folder may be the cause."""
    if not isinstance(error, ImportError | AttributeError):
        return None
    folder = Path.cwd()
    for name, module in sorted(sys.modules.items()):
        path = Path(getattr(module, "__file__", None) or "/")
        path = path.parent if path.name == "__init__.py" else path
        if path.parent == folder and (name in sys.stdlib_module_names or name in LIBRARIES):
            whose = "Python's own module" if name in sys.stdlib_module_names else "the library"
            return f"./{path.name} hides {whose} {name}: rename it"
    return None
