"""What a rank is told of its run, and what it reports back."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import lightning as L

    from project.launch.checkpoint import BestCheckpoint


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

    @classmethod
    def of_training(
        cls,
        trainer: L.Trainer,
        metrics: dict[str, float],
        best: BestCheckpoint | None,
        monitor: str | None,
        run: Run,
        ended_early: str | None = None,
    ) -> Outcome:
        """The outcome of a finished training."""
        from project.launch.spans import of_rank_0, of_steps
        from project.sweep.pruning import was_pruned
        from project.tracking.curves import TrainingCurves
        from project.tracking.tracker import Tracker

        tracker = next((c for c in trainer.callbacks if isinstance(c, Tracker)), None)  # type: ignore[attr-defined]
        curves = next((c for c in trainer.callbacks if isinstance(c, TrainingCurves)), None)  # type: ignore[attr-defined]
        score = best.score if best is not None and best.score is not None else metrics.get(monitor or "")
        return cls(
            metrics=dict(sorted(metrics.items())),
            spans={name: span for name, span in of_steps(trainer).items() if name in metrics},
            of_rank_0=[name for name in of_rank_0(trainer) if name in metrics],
            objective=score,
            folder=str(run.folder),
            checkpoint=best.path if best else None,
            world_size=trainer.world_size,
            num_devices=trainer.num_devices if trainer.world_size == 1 else 1,
            epochs=trainer.current_epoch,
            steps=trainer.global_step,
            ended_early=ended_early,
            first_step_s=curves.first_step_at - run.started_at if curves and curves.first_step_at else None,
            train_s=curves.train_s if curves else None,
            samples_per_s=curves.samples_per_s if curves else None,
            diagnosis=tracker.diagnosis.lines() if tracker and tracker.diagnosis else [],
            pruned=was_pruned(trainer),
        )
