"""Trials of a search that end early: rank 0 asks Optuna, all ranks stop together."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
from lightning.pytorch.callbacks import Callback

if TYPE_CHECKING:
    import optuna

Config = dict[str, Any]


def pruning(config: Config) -> list[TrialPruning]:
    """The callback of a trial that Optuna may stop; none outside a search, without a pruner, or by another metric.

    What a pruner is told is the monitored metric, which says nothing of other objectives.
    """
    settings = config.get("sweep") or {}
    job = settings.get("job") or {}
    compared = set(settings.get("objectives") or [config["monitor"]])
    if job.get("trial") is None or not settings.get("pruner") or compared != {config["monitor"]}:
        return []
    return [TrialPruning(config["monitor"], settings["pruner"], **{key: job[key] for key in job if key != "varied"})]


def was_pruned(trainer: L.Trainer) -> bool:
    """Whether the search has ended its training."""
    return any(isinstance(callback, TrialPruning) and callback.pruned for callback in trainer.callbacks)  # type: ignore[attr-defined]


class TrialPruning(Callback):
    """Reports the monitored metric to Optuna after every validation, and ends the training where Optuna says so.

    Steps are counted in validations, which mean the same in trials of any batch size.

    Args:
        monitor: The metric, which all ranks hold the same value of.
        pruner: Optuna's pruner, as a config with ``_target_``.
        folder: The study's folder.
        study: Its name.
        storage: Where it is stored, as ``sweep.storage``.
        trial: The trial's number.
    """

    def __init__(self, monitor: str, pruner: Config, folder: str, study: str, storage: str, trial: int) -> None:
        self.monitor = monitor
        self.pruned = False
        self._validations = 0
        self._pruner, self._folder, self._study_name, self._storage, self._number = (
            pruner, Path(folder), study, storage, trial,
        )  # fmt: skip
        self._trial: optuna.Trial | None = None

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != "fit" or self.pruned:
            return
        self._validations += 1
        stop = trainer.is_global_zero and self._ask(float(trainer.callback_metrics[self.monitor]))
        if trainer.strategy.broadcast(stop, src=0):
            self.pruned = trainer.should_stop = True
            if trainer.is_global_zero:
                print(f"pruned after {self._validations} validations", flush=True)

    def _ask(self, value: float) -> bool:
        """Report the value of the last validation; whether to stop."""
        from optuna.exceptions import UpdateFinishedTrialError

        trial = self._trial = self._trial or self._open()
        try:
            trial.report(value, self._validations)
        except UpdateFinishedTrialError:
            return True  # its search ended without it and was started again: nobody waits for this trial
        return trial.should_prune()

    def _open(self) -> optuna.Trial:
        import optuna
        from hydra.utils import instantiate

        from project.sweep.study import open_storage

        study = optuna.load_study(
            study_name=self._study_name,
            storage=open_storage(self._storage, self._folder),
            pruner=instantiate(self._pruner),
        )
        return optuna.Trial(study, study.get_trials(deepcopy=False)[self._number]._trial_id)

    def state_dict(self) -> dict[str, Any]:
        """What a run that resumes must know: how often it has reported."""
        return {"validations": self._validations}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Count on from there."""
        self._validations = state_dict["validations"]
