"""What a batch is made of, and how many samples it holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor


def children(value: Any) -> dict[Any, Any]:
    """The parts of a dict, list, tuple or dataclass; none of anything else."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, list) or type(value) is tuple or hasattr(value, "_fields"):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return {}


def num_samples(batch: Any) -> int:
    """As ``batch_length``; 1 where nothing tells."""
    length = batch_length(batch)
    return 1 if length is None else length


def batch_length(value: Any) -> int | None:
    """The first dimension of the first tensor in a structure, or else the length of the first list; None without."""
    length = first_length(value)
    if length is not None:
        return length
    if isinstance(value, list):
        return len(value)
    return next((n for n in map(batch_length, _parts(value)) if n is not None), None)


def first_length(value: Any) -> int | None:
    """The first dimension of the first tensor in a structure; None without, and of a list of samples.

    Asked several times in each step, and so written for lists of tensors: a microsecond for two of them.
    """
    if isinstance(value, Tensor):
        return value.shape[0] if value.ndim else None
    if isinstance(value, list) and _is_of_samples(value):
        return None
    for part in _parts(value):
        length = first_length(part)
        if length is not None:
            return length
    return None


def _is_of_samples(items: list[Any]) -> bool:
    """Whether there are tensors of different lengths, dicts or dataclasses, whose lengths are not the batch's."""
    lengths = set()
    for item in items:
        if isinstance(item, Tensor):
            lengths.add(item.shape[0] if item.ndim else None)
        elif isinstance(item, Mapping) or dataclasses.is_dataclass(item):
            return True
    return len(lengths) > 1


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, list | tuple):
        return value
    return value.values() if isinstance(value, dict) else children(value).values()
