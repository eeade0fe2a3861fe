"""Numbered checkpoints put in order by the steps that they were saved after."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from project.strategies.checkpoint_files import all_numbered, number_of, numbered
from project.strategies.sharded_checkpoint import META, is_sharded


def stored_step(path: Path) -> int:
    """The optimizer steps behind a checkpoint; its tensors stay on disk."""
    sharded = is_sharded(path)
    stored = torch.load(path / META if sharded else path, map_location="cpu", weights_only=True, mmap=not sharded)
    return int(stored["global_step"])


def sort_by_step(path: Path, steps: Sequence[int]) -> list[int]:
    """Let the files of these steps come first, in their order, and the others behind them; which steps were found.

    For one process. One that is stopped half-way leaves every file under a name that counts.
    """
    others = all_numbered(path)
    of_file = {file: _step(file) for file in others}
    order: list[Path] = []
    for step in steps:
        if file := next((file for file in others if of_file[file] == step), None):
            order.append(file)
            others.remove(file)
    found = [step for step in steps if step in {of_file[file] for file in order}]
    order += others
    if order != [numbered(path, number) for number in range(len(order))]:
        beyond = 1 + max(map(number_of, order))
        aside = [file.rename(numbered(path, beyond + number)) for number, file in enumerate(order)]
        for number, file in enumerate(aside):
            file.rename(numbered(path, number))
    return found


def _step(path: Path) -> int | None:
    try:
        return stored_step(path)
    except Exception:  # torch raises whatever a damaged file makes it stumble over
        return None
