"""What came of a training."""

from __future__ import annotations

import lightning as L

from project.launch.run import Outcome, Run
from project.sweep.pruning import was_pruned
from project.tracking.curves import TrainingCurves
from project.tracking.tracker import Tracker
from project.training.checkpoint import BestCheckpoint
from project.training.spans import of_rank_0, of_steps


def outcome_of(
    trainer: L.Trainer,
    metrics: dict[str, float],
    best: BestCheckpoint | None,
    monitor: str | None,
    run: Run,
    ended_early: str | None = None,
) -> Outcome:
    """The outcome of a finished training; ``metrics`` are those of its last validation and of its test."""
    tracker = next((c for c in trainer.callbacks if isinstance(c, Tracker)), None)  # type: ignore[attr-defined]
    curves = next((c for c in trainer.callbacks if isinstance(c, TrainingCurves)), None)  # type: ignore[attr-defined]
    score = best.score if best is not None and best.score is not None else metrics.get(monitor or "")
    return Outcome(
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
