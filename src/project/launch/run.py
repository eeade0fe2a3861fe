"""What a rank is told of its run, and what it reports back."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Run:
    """One run as one of its ranks sees it."""

    folder: Path
    overrides: list[str]
    environment: dict[str, Any]
    started_at: float  # seconds since 1970: when the process that the user started began
    rank: int = 0
    world_size: int = 1
    resumes: bool = False  # goes on from the last checkpoint in the folder, if there is one


@dataclass(frozen=True)
class Outcome:
    """What came of a run: plain data, so that it crosses processes and becomes ``metrics.json``.

    ``objective`` is what a sweep optimizes: the best value of the monitored metric; ``folder`` the run folder.
    """

    metrics: dict[str, float]
    objective: float | None = None
    folder: str | None = None
    checkpoint: str | None = None
    files: dict[str, str] = field(default_factory=dict)
    world_size: int = 1
    num_devices: int = 1  # of each rank; several where one process drives them, as under dp
    epochs: int | None = None
    steps: int | None = None
    ended_early: str | None = None  # why, where not all epochs or steps were trained
    first_step_s: float | None = None  # from the start of the command to the end of the first step
    train_s: float | None = None
    samples_per_s: float | None = None
    diagnosis: list[str] = field(default_factory=list)  # what bounds the training, and what to change
    pruned: bool = False  # a search stopped the training early
    spans: dict[str, str] = field(default_factory=dict)  # of what metrics are that are not of an epoch or a test
    of_rank_0: list[str] = field(default_factory=list)  # metrics of which other ranks have other values
