"""When checkpoints are saved: the last states by epochs, steps, time and on request; the best by a metric."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn

from project.data.loaders import is_resumable, shares_evenly
from project.errors import UserError
from project.launch.heartbeat import BEAT
from project.launch.stopping import REQUEST, Agreement, Stopped
from project.strategies.checkpoint_files import CheckpointFiles
from project.strategies.checkpoint_order import sort_by_step
from project.tracking.between_steps import BetweenSteps


def save(trainer: L.Trainer, path: Path, place: int = 0, keep: int = 1, in_background: bool = False) -> bool:
    """Save a checkpoint as ``path``, or at another place among ``keep`` of that name; whether it was written.

    For all ranks. ``False`` is a full disk and its like, which has been told. In the background training waits for the
    copy alone; whether that was written, ``was_written`` says later.
    """
    files = trainer.strategy.checkpoint_io
    own = {"place": place, "keep": keep, "in_background": in_background}
    options = own if isinstance(files, CheckpointFiles) else None
    BEAT(trainer.global_step, "saves a checkpoint")
    trainer.save_checkpoint(path, storage_options=options)
    written: bool = trainer.strategy.broadcast(getattr(files, "failure", None) is None)
    return written


def was_written(trainer: L.Trainer, path: Path) -> bool:
    """Whether what was last saved in the background under a path is there; for all ranks."""
    files = trainer.strategy.checkpoint_io
    written: bool = trainer.strategy.broadcast(not isinstance(files, CheckpointFiles) or files.wait(path))
    return written


class LastCheckpoint(Checkpoint, BetweenSteps):
    """Keeps the last states of a run, from which it can go on exactly; saves, and ends, when the run is asked to stop.

    ``last.ckpt`` is the newest, ``last-1.ckpt`` the one before it. Several of the intervals may be given. Within an
    epoch nothing is saved where a loader can't find its place again: one with a sampler of the user's own.

    Args:
        dirpath: Their folder.
        keep: How many there are; with two, one is left when the newest is damaged.
        every_n_epochs: And after the last epoch; null for that one alone.
        every_n_steps: Optimizer steps.
        every_s: Seconds.
        min_gap_s: An epoch that ends sooner after the last save is not saved for its end alone; null saves all.
        in_background: Training goes on while a file is written; not when the run is to stop.

    Raises:
        UserError: an argument can't be.
    """

    monitor = None
    best_model_score = None

    def __init__(
        self,
        dirpath: str,
        keep: int = 2,
        every_n_epochs: int | None = 1,
        every_n_steps: int | None = None,
        every_s: float | None = None,
        min_gap_s: float | None = None,
        in_background: bool = True,
    ) -> None:
        for name, value, least in (
            ("keep", keep, 1), ("every_n_epochs", every_n_epochs, 1), ("every_n_steps", every_n_steps, 1)
        ):  # fmt: skip
            if value is not None and value < least:
                raise UserError(f"callbacks.last.{name}={value} can't be: type a whole number from {least}")
        if every_s is not None and every_s <= 0:
            raise UserError(f"callbacks.last.every_s={every_s} can't be: type a number of seconds above 0, or null")
        if min_gap_s is not None and min_gap_s < 0:
            raise UserError(f"callbacks.last.min_gap_s={min_gap_s} can't be: type a number of seconds from 0, or null")
        self.path = Path(dirpath) / "last.ckpt"
        self.keep = keep
        self.every_n_epochs = every_n_epochs
        self.every_n_steps = every_n_steps
        self.every_s = every_s
        self.min_gap_s = min_gap_s or 0.0
        self.in_background = in_background
        self.best_model_path = ""
        self._saved_after = -1  # optimizer steps
        self._saved_at_s = 0.0  # of the clock that the ranks agree on
        self._is_due = False
        self._asked = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._agreement = Agreement(trainer.world_size)
        self._can_go_on_inside = is_resumable(trainer.train_dataloader)
        self._saved_at_s = self._agreement.elapsed_s
        REQUEST.deferred = not trainer.fast_dev_run  # type: ignore[attr-defined]

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        REQUEST.deferred = False
        if asked := self._agreement.asked(now=True):
            raise self._stopped(asked, trainer)

    def on_exception(self, *_: Any) -> None:
        REQUEST.deferred = False

    def on_step_done(self, trainer: L.Trainer) -> None:
        asked = self._agreement.asked()
        step = trainer.global_step
        if asked and self._can_go_on_inside and _awaits_end_of_epoch(trainer):
            self._asked = asked  # to be done where the epoch ends, after a validation at most
            return
        self._is_due |= self.every_n_steps is not None and step % self.every_n_steps == 0
        self._is_due |= self.every_s is not None and self._agreement.elapsed_s - self._saved_at_s >= self.every_s
        can_save = self._can_go_on_inside and not _awaits_end_of_epoch(trainer)
        # After a validation its points in the curves would be written a second time by a run that goes on before it.
        if can_save and (asked or (self._is_due and not _is_validated_next(trainer))):
            self._save(trainer, is_last=bool(asked))
        if asked:
            raise self._stopped(asked, trainer)

    def on_epoch_done(self, trainer: L.Trainer) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        asked = self._asked or self._agreement.asked()
        by_epochs = self.every_n_epochs is not None and trainer.current_epoch % self.every_n_epochs == 0
        by_epochs = by_epochs and self._agreement.elapsed_s - self._saved_at_s >= self.min_gap_s
        is_last = bool(asked) or trainer.fit_loop.done
        if by_epochs or is_last or self._is_due:
            self._save(trainer, is_last)
        if asked:
            raise self._stopped(asked, trainer)

    def on_validation_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING or trainer.should_stop:
            return
        if not shares_evenly(trainer.val_dataloaders):
            return  # ranks with more batches than others would ask alone
        if self._can_go_on_inside and _awaits_end_of_epoch(trainer):
            return
        if asked := self._agreement.asked("validate"):
            # As it was before the validation, which a run that goes on begins anew.
            if self._can_go_on_inside:
                self._save(trainer, is_last=True)
            raise self._stopped(asked, trainer)

    def _stopped(self, asked: int, trainer: L.Trainer) -> Stopped:
        return Stopped(asked, saved=self._saved_after == trainer.global_step, by_all=True)

    def _save(self, trainer: L.Trainer, is_last: bool) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        self._saved_at_s = self._agreement.elapsed_s
        self._is_due = False
        if save(trainer, self.path, keep=self.keep, in_background=self.in_background and not is_last):
            self._saved_after = trainer.global_step
            self.best_model_path = str(self.path)


def _is_validated_next(trainer: L.Trainer) -> bool:
    loop = trainer.fit_loop
    assert loop._data_fetcher is not None
    return loop.epoch_loop._should_check_val_fx(loop._data_fetcher)


def _awaits_end_of_epoch(trainer: L.Trainer) -> bool:
    """Whether means over the epoch are complete, and not logged: they would be lost, as no batch brings them back."""
    loop = trainer.fit_loop.epoch_loop
    return loop._num_ready_batches_reached() and any(result.meta.on_epoch for result in loop._results.values())


class BestCheckpoints(ModelCheckpoint):
    """Keeps the best states by a metric: ``best.ckpt``, the second best in ``best-1.ckpt``, and so on.

    Without a metric ``best.ckpt`` is the state of the last validation.

    Args:
        dirpath: Their folder.
        monitor: A logged metric.
        mode: ``min`` or ``max``.
        keep: How many there are.
        in_background: Training goes on while a file is written.

    Raises:
        UserError: ``keep`` can't be.
    """

    def __init__(
        self, dirpath: str, monitor: str | None, mode: str = "min", keep: int = 1, in_background: bool = True
    ) -> None:
        if keep < 1:
            raise UserError(f"callbacks.best.keep={keep} can't be: type a whole number from 1")
        super().__init__(dirpath, "best", monitor, mode=mode, enable_version_counter=False)
        self.path = Path(dirpath) / "best.ckpt"
        self.keep = keep
        self.in_background = in_background
        self._kept: list[tuple[float, int]] = []  # score and step of each file, the best first
        self._kept_before: list[tuple[float, int]] = []  # the last save
        self._goes_on = False

    @property
    def scores(self) -> list[float]:
        """The best first; empty without a metric."""
        return [score for score, _ in self._kept] if self.monitor is not None else []

    def _save_topk_checkpoint(self, trainer: L.Trainer, monitor_candidates: dict[str, torch.Tensor]) -> None:
        if self.monitor is not None and self.monitor not in monitor_candidates:
            super()._save_topk_checkpoint(trainer, monitor_candidates)  # which tells
            return
        self._check_written(trainer)
        if self._goes_on:
            self._goes_on = False
            self._sort_files(trainer)
        score, place = math.nan, 0
        if self.monitor is not None:
            score = float(monitor_candidates[self.monitor])
            place = trainer.strategy.broadcast(sum(not self._is_better(score, other) for other in self.scores))
        if place >= self.keep:
            return
        # As many as count: a file behind them is of a step that comes again, and makes room.
        if save(trainer, self.path, place, min(len(self._kept) + 1, self.keep), self.in_background):
            self._last_global_step_saved = trainer.global_step
            self._kept_before = self._kept
            self._kept = [*self._kept[:place], (score, trainer.global_step), *self._kept[place:]][: self.keep]
            self._point_to_best()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        self._check_written(trainer)

    def _check_written(self, trainer: L.Trainer) -> None:
        """What could not be written does not count."""
        if not was_written(trainer, self.path):
            self._kept = self._kept_before
            self._point_to_best()

    def _sort_files(self, trainer: L.Trainer) -> None:
        """Put behind the others what a run saved after the state that it goes on from: those steps come again.

        Not before the first of them does: until then ``best.ckpt`` is the best that there was.
        """
        steps = [step for _, step in self._kept]
        found = sort_by_step(self.path, steps) if trainer.is_global_zero else []
        found = trainer.strategy.broadcast(found)
        self._kept = self._kept_before = [pair for pair in self._kept if pair[1] in found]
        self._point_to_best()

    def _is_better(self, score: float, other: float) -> bool:
        if math.isnan(score) or math.isnan(other):
            return math.isnan(other) and not math.isnan(score)
        return score < other if self.mode == "min" else score > other

    def _point_to_best(self) -> None:
        self.best_model_path = str(self.path) if self.scores or self.monitor is None else ""
        self.best_model_score = torch.tensor(self.scores[0]) if self.scores else None

    def state_dict(self) -> dict[str, Any]:
        return {"scores": [score for score, _ in self._kept], "steps": [step for _, step in self._kept]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        scores = state_dict["scores"]
        steps = state_dict.get("steps", [-1] * len(scores))  # checkpoints of older versions do not know them
        self._kept = self._kept_before = list(zip(scores, steps, strict=True))[: self.keep]
        self._goes_on = -1 not in steps
        if self.scores:
            self._point_to_best()
