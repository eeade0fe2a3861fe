"""Parts of a batch, and one output of theirs: for strategies that call a module with less than it was called with.

Inputs: tensors whose first dimension is the batch's length (that of the first tensor) are split as `torch.chunk`
does, so chunks may be uneven and a small batch makes fewer. A list of the batch's length holds one item per sample and
is split too, unless its tensors have that length themselves. Dicts, tuples, other lists and dataclasses are searched.
Everything else goes into each part whole: also a tensor of another length, so a tensor that is not of the batch but
could have its length by chance belongs into a buffer.

Outputs: tensors are concatenated on the first dimension, lists with an item per sample too; dicts, tuples, other lists
and dataclasses are searched; other values must be equal and pass through. A tensor without dimensions, such as a loss,
is refused: the mean of the parts' means is not the mean.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from project.batch import children, first_length
from project.errors import UserError


def chunks(length: int, number: int) -> list[slice]:
    """The rows of each chunk, as `torch.chunk` makes them: at most `number`, equal but for the last."""
    size = max(1, -(-length // number))
    return [slice(start, start + size) for start in range(0, length, size)]


def share(value: Any, batch: int | None, rows: slice, device: torch.device) -> Any:
    """The rows of a structure, on a device; ``batch`` None shares nothing out."""
    if isinstance(value, Tensor):
        # A slice, not torch.split, whose results can't be changed in place.
        part = value[rows] if value.ndim and len(value) == batch else value
        return to_device(part, device)
    if batch is not None and _is_samples(value, batch):
        return [share(item, None, rows, device) for item in value[rows]]
    return _rebuilt(value, {key: share(child, batch, rows, device) for key, child in children(value).items()})


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy to the CPU is waited for; others are ordered by their devices' streams."""
    return tensor.to(device, non_blocking=device.type != "cpu")


def gather(outputs: list[Any], lengths: list[int], device: torch.device, name: str) -> Any:
    """One output on ``device`` of those for the parts of a batch, which have as many samples as ``lengths`` says.

    Raises:
        UserError: the outputs can't be joined; ``name`` says what they are outputs of.
    """
    first = outputs[0]
    if any(type(output) is not type(first) for output in outputs):
        raise UserError(_differ(name, [type(output).__name__ for output in outputs]))
    if isinstance(first, Tensor):
        if any(output.ndim == 0 for output in outputs):
            raise UserError(
                f"{name} returned a tensor without dimensions, such as a loss, for a part of the batch, and outputs of "
                "parts are joined along the batch: compute it outside of the module, in the step, on the full batch, "
                "or type trainer/strategy=ddp"
            )
        if len({output.shape[1:] for output in outputs}) > 1:
            raise UserError(_differ(name, [f"shape {tuple(output.shape)}" for output in outputs]))
        return torch.cat([to_device(output, device) for output in outputs])
    full = isinstance(first, list) and [len(output) for output in outputs] == lengths
    if full and any(_is_samples(output, length) for output, length in zip(outputs, lengths, strict=True)):
        return [share(item, None, slice(None), device) for output in outputs for item in output]
    parts = [children(output) for output in outputs]
    if any(part.keys() != parts[0].keys() for part in parts):
        raise UserError(_differ(name, [f"keys {list(part)}" for part in parts]))
    if parts[0]:
        joined = {key: gather([part[key] for part in parts], lengths, device, f"{name}: {key}") for key in parts[0]}
        return _rebuilt(first, joined)
    if not all(output is first or _equal(output, first) for output in outputs):
        raise UserError(_differ(name, [repr(output)[:40] for output in outputs]))
    return first


def _differ(name: str, found: list[str]) -> str:
    return (
        f"{name} returned for parts of a batch what can't be joined, {', '.join(found)}: return tensors that differ in "
        "the first dimension at most, or type trainer/strategy=ddp"
    )


def _equal(left: Any, right: Any) -> bool:
    try:
        return bool(left == right)
    except (ValueError, RuntimeError):  # arrays
        return False


def _is_samples(value: Any, length: int) -> bool:
    """Whether a value is a list with one item per sample, not one of tensors that hold an item per sample each."""
    if not isinstance(value, list) or len(value) != length:
        return False
    tensors = [item for item in value if isinstance(item, Tensor)]
    return not tensors or any(first_length(tensor) != length for tensor in tensors)


def _rebuilt(value: Any, children: Mapping[Any, Any]) -> Any:
    """A value of the same type with other parts."""
    if not children:
        return value
    if isinstance(value, list):
        return list(children.values())
    if isinstance(value, tuple):
        return type(value)(*children.values()) if hasattr(value, "_fields") else tuple(children.values())
    rebuilt = copy.copy(value)
    for key, child in children.items():
        if isinstance(value, Mapping):
            rebuilt[key] = child
        else:
            object.__setattr__(rebuilt, key, child)  # frozen dataclasses too
    return rebuilt
