"""Why a training ended before its last epoch or step."""

from __future__ import annotations

import lightning as L
from lightning.pytorch.callbacks import EarlyStopping, Timer
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason


def ended_early(trainer: L.Trainer) -> str | None:
    """The reason in a few words; None where all was trained, or where what stopped it tells so itself."""
    if trainer.max_epochs is not None and 0 <= trainer.max_epochs <= trainer.current_epoch:
        return None
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, EarlyStopping) and callback.stopping_reason in _REASONS:
            reason = _REASONS[callback.stopping_reason].format(**vars(callback))
            return reason.replace("last 1 validations", "last validation")
        if isinstance(callback, Timer) and (remaining := callback.time_remaining()) is not None and remaining <= 0:
            return "trainer.max_time is over"
    return None


_REASONS = {
    EarlyStoppingReason.PATIENCE_EXHAUSTED: "{monitor} was not better in the last {patience} validations",
    EarlyStoppingReason.STOPPING_THRESHOLD: "{monitor} reached stopping_threshold={stopping_threshold}",
    EarlyStoppingReason.DIVERGENCE_THRESHOLD: "{monitor} went beyond divergence_threshold={divergence_threshold}",
    EarlyStoppingReason.NON_FINITE_METRIC: "{monitor} is no finite number",
}
