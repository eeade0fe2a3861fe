"""Which rank holds the others up, from the times at which all came to what they do together. Pure."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def lateness(
    came_s: Tensor, waits: Tensor, follows: Tensor | None = None, groups: Tensor | None = None
) -> Tensor:  # (R,)
    """The share of the time by which each of R ranks holds the others up; NaN where nothing is known.

    From one collective to the next a rank works for some time: from the moment at which the last rank had come, where
    it waits for it, else from its own coming. What it works longer than the others is its excess; as noise makes all
    ranks exceed now and then, that of the others is taken off.

    Args:
        came_s: Seconds at which each rank came to the same C collectives, (R, C).
        waits: Whether a rank waits for the others at a collective before it goes on, (C - 1,) bool.
        follows: Whether what lies between a collective and the next is training, (C - 1,) bool; by default all.
        groups: Numbers that are equal where ranks meet in a collective, (R, C); by default all ranks meet.
    """
    num_ranks, num_collectives = came_s.shape
    if follows is None:
        follows = torch.ones(max(0, num_collectives - 1), dtype=torch.bool)
    if num_ranks < 2 or not follows.any():
        return torch.full((num_ranks,), torch.nan, dtype=came_s.dtype)
    came_s = came_s - came_s.min()  # seconds since 1970 leave few digits for microseconds
    own, after, groups = came_s[:, :-1], came_s[:, 1:], None if groups is None else groups[:, :-1]
    if not follows.all():  # else copies of all would cost as much as the rest
        own, after, waits = own[:, follows], after[:, follows], waits[follows]
        groups = None if groups is None else groups[:, follows]
    last = own.max(dim=0).values if groups is None else _last_of_group(own, groups)
    began = torch.where(waits & (after >= last), last, own)
    worked = after - began
    excess = (worked - median_of_others(worked)).clamp(min=0).sum(dim=1, keepdim=True)
    late = (excess - median_of_others(excess)).clamp(min=0)[:, 0]
    return late / (after - own).sum(dim=1).mean()


def median_of_others(values: Tensor) -> Tensor:
    """For each rank the median of the other ranks' values, by column, the lower one of two; (R, C), R >= 2."""
    middle = (len(values) - 2) // 2  # among the others, counted from 0
    # NumPy finds a place in the order in a third of torch's time.
    ordered = torch.from_numpy(np.partition(values.numpy(), (middle, middle + 1), axis=0)[middle : middle + 2])
    # The smaller half without the rank's own value, if that is in it.
    return torch.where(values <= ordered[0], ordered[1], ordered[0])


def _last_of_group(came_s: Tensor, groups: Tensor) -> Tensor:
    """The latest coming among the ranks of equal number, by column; (R, C)."""
    result = torch.empty_like(came_s)
    # Few ways to group the ranks come again and again: the dimensions of a mesh.
    is_left = torch.ones(groups.shape[1], dtype=torch.bool)
    while is_left.any():
        way = groups[:, int(is_left.int().argmax())]
        columns = (groups == way[:, None]).all(dim=0)
        is_left &= ~columns
        _, group_of = torch.unique(way, return_inverse=True)
        own = came_s[:, columns]
        last = own.new_full((int(group_of.max()) + 1, own.shape[1]), -torch.inf)
        last.scatter_reduce_(0, group_of[:, None].expand_as(own), own, "amax")
        result[:, columns] = last[group_of]
    return result
