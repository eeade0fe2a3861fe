"""Of which steps and ranks the metrics of a training are."""

from __future__ import annotations

from typing import Any

import lightning as L

from project.tracking.curves import TrainingCurves
from project.tracking.facts import num_model_replicas


def of_steps(trainer: L.Trainer) -> dict[str, str]:
    """Metrics that are not of a whole epoch, and of what they are."""
    has_curves = any(isinstance(callback, TrainingCurves) for callback in trainer.callbacks)  # type: ignore[attr-defined]
    spans = dict.fromkeys(TrainingCurves.NAMES if has_curves else (), "the last logged steps")
    results: Any = trainer.fit_loop.epoch_loop._results
    own = [metric for metric in results.values() if metric.meta.on_step]
    return spans | {results._forked_name(metric, on_step=True)[1]: "the last step" for metric in own}


def of_rank_0(trainer: L.Trainer) -> list[str]:
    """Metrics that other ranks have other values of: logged without ``sync_dist``, or a torchmetrics object's step."""
    if num_model_replicas(trainer) == 1:
        return []
    epoch_loop = trainer.fit_loop.epoch_loop
    collections: list[Any] = [epoch_loop._results, epoch_loop.val_loop._results, trainer.test_loop._results]
    names: set[str] = set()
    for results in collections:
        for metric in results.values():
            meta = metric.meta
            of_all = metric.is_tensor and meta.sync.should and not meta.sync.rank_zero_only
            if meta.on_step and not of_all:
                names.add(results._forked_name(metric, True)[1])
            if meta.on_epoch and not of_all and metric.is_tensor:
                names.update(results._forked_name(metric, False))
    return sorted(names)
