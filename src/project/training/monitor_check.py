"""Is each monitored metric one that the model logs, and the same on every rank?"""

from __future__ import annotations

import math
import warnings
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden

from project.config.monitor_mode import direction
from project.errors import UserError, nearest
from project.notices import notice


class MonitorCheck(Callback):
    """Refuses a monitor that can't work: known after one validation batch, before any training.

    A name that begins with ``train`` is logged later, and Lightning refuses it at its first use. Values are
    compared over the ranks after every validation: best checkpoint, early stopping and learning rate would each
    follow another rank, and the ranks' weights would drift apart.
    """

    def __init__(self, monitor: str | None, mode: str = "max") -> None:
        self.monitor = monitor
        self.mode = mode
        self._is_told = False  # of a value that is not finite

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.enable_validation or self.monitor is None or self.monitor.startswith("train"):
            return
        has_step = is_overridden("validation_step", pl_module)
        why = "" if has_step else f", because {type(pl_module).__name__} has no validation_step"
        notice(
            f"Nothing is validated{why}: monitor={self.monitor} will find nothing to choose the best state by, and the "
            "last one is taken. Type monitor=null, or monitor=train/loss mode=min"
        )
        warnings.filterwarnings("ignore", r".*could not find the monitored key")  # Lightning's, each epoch

    def on_sanity_check_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        logged = sorted(_logged(trainer))
        for name in self._monitors(trainer):
            if name in logged or name.startswith("train"):
                continue
            choices = ", ".join(logged) if logged else "nothing"
            is_own = name == self.monitor
            advice = nearest(name, logged) or (logged[0] if logged else "null")
            better = direction(advice)
            if is_own and better not in (None, self.mode):
                advice += f" mode={better}"
            raise UserError(
                f"{'' if is_own else 'a callback or scheduler: '}monitor={name} is not among what "
                f"{type(pl_module).__name__} logs in validation ({choices}): "
                f"{'type' if is_own else 'give it'} monitor={advice}"
            )

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        names = self._monitors(trainer)
        metrics = trainer.callback_metrics
        # A metric that only some ranks log is a difference too: there it is None.
        own = {name: float(metrics[name]) if name in metrics else None for name in names}
        if not trainer.sanity_checking:
            self._tell_not_finite(own, trainer)
        if trainer.world_size == 1 or not names:
            return
        of_ranks: list[dict[str, float | None]] = [own] * trainer.world_size
        torch.distributed.all_gather_object(of_ranks, own)
        for name in names:
            values = [str(of_rank[name]) for of_rank in of_ranks]  # as text, so that NaN equals NaN
            if len(set(values)) > 1:
                raise UserError(
                    f"monitor={name} differs between the ranks ({', '.join(values[:4])}): log it with "
                    f'self.log("{name}", ..., sync_dist=True), or as a torchmetrics metric'
                )

    def _tell_not_finite(self, values: dict[str, float | None], trainer: L.Trainer) -> None:
        for name, value in values.items():
            if value is not None and not math.isfinite(value) and not self._is_told:
                self._is_told = True
                notice(
                    f"monitor={name} is {value} after step {trainer.global_step}, by which no state is better than "
                    "another: look in the validation data and in what validation_step logs for what is not finite"
                )

    def _monitors(self, trainer: L.Trainer) -> list[str]:
        """Metrics that something decides by: config, callbacks and schedulers, in an order all ranks share."""
        names = [self.monitor, *(getattr(callback, "monitor", None) for callback in trainer.callbacks)]  # type: ignore[attr-defined]
        names += [schedule.monitor for schedule in trainer.lr_scheduler_configs if schedule.reduce_on_plateau]
        return sorted({name for name in names if name})


def _logged(trainer: L.Trainer) -> set[str]:
    """Names of what a sanity check has logged; of several loaders ``callback_metrics`` has none by now."""
    results: Any = trainer._results or {}
    of_epoch = [metric for metric in results.values() if metric.meta.on_epoch]
    return {*trainer.callback_metrics, *(name for metric in of_epoch for name in results._forked_name(metric, False))}
