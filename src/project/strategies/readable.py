"""Can a checkpoint be read back? Reading executes nothing (``weights_only``), so it knows plain data and tensors."""

from __future__ import annotations

import inspect
import io
from collections import OrderedDict
from typing import Any

from torch import Tensor, load, nn, save
from torch.distributed.tensor import DTensor

PLAIN_TENSORS = (Tensor, nn.Parameter, DTensor)
ADVICE = "put in plain data there, such as numbers, texts, lists, dicts and tensors"


def unreadable(checkpoint: Any) -> tuple[list[str], Any] | None:
    """The keys that lead to what can't be read back, and what lies there; None where all can be."""
    if _is_read(checkpoint):
        return None
    path: list[str] = []
    while (child := _unreadable_child(checkpoint)) is not None:
        path.append(child[0])
        checkpoint = child[1]
    return path, checkpoint


def described(value: Any) -> str:
    """``an object of torch.nn.modules.linear.Linear``."""
    if inspect.isclass(value) or inspect.isroutine(value):
        return f"the {'class' if inspect.isclass(value) else 'function'} {value.__module__}.{value.__qualname__}"
    return f"an object of {type(value).__module__}.{type(value).__qualname__}"


def _unreadable_child(node: Any) -> tuple[str, Any] | None:
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list | tuple) else ()
    return next(((str(key), value) for key, value in items if not _is_read(value)), None)


def _is_read(node: Any) -> bool:
    """By trying, as torch's list of what it reads grows, and the user may add to it."""
    file = io.BytesIO()
    try:
        save(_without_tensors(node), file)
        file.seek(0)
        load(file, map_location="cpu", weights_only=True)
    except Exception:  # whatever the pickler, the unpickler and the classes in between raise
        return False
    return True


def _without_tensors(node: Any) -> Any:
    """Plain tensors are read always, and may be large."""
    if type(node) in PLAIN_TENSORS:
        return None
    if type(node) in (dict, OrderedDict):
        return type(node)((key, _without_tensors(value)) for key, value in node.items())
    if type(node) in (list, tuple):
        return type(node)(_without_tensors(value) for value in node)
    return node
