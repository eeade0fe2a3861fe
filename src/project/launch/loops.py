"""Lightning's training loop, with a place between two steps where a run can be saved, stopped and resumed exactly."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.loops.fit_loop import RestartStage, _FitLoop
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector

from project.launch.heartbeat import BEAT


class BetweenSteps:
    """What a callback that derives from this is told besides Lightning's hooks; on all ranks, after the same steps."""

    def on_step_done(self, trainer: L.Trainer) -> None:
        """The optimizer has stepped; what follows the step (a validation, the end of the epoch) has not begun."""

    def on_epoch_done(self, trainer: L.Trainer) -> None:
        """Everything that belongs to the epoch is over, schedulers included; the next has not begun."""


def install(trainer: L.Trainer) -> None:
    """Give a trainer these loops, and leave signals to ``project.launch.stopping``.

    Lightning's handler of SIGTERM talks to the other ranks from within the signal, where they may be in the middle of
    something else; and to hear of it, each rank waits for rank 0 before every batch.
    """
    theirs = trainer.fit_loop
    own = FitLoop(trainer, theirs.min_epochs, theirs.max_epochs)
    own.epoch_loop = EpochLoop(trainer, theirs.min_steps, theirs.max_steps)
    trainer.fit_loop = own
    trainer._signal_connector = NoSignals(trainer)


class NoSignals(_SignalConnector):
    """Registers nothing."""

    def register_signal_handlers(self) -> None:
        pass

    def teardown(self) -> None:
        pass


def _tell(trainer: L.Trainer, event: str) -> None:
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, BetweenSteps):
            getattr(callback, event)(trainer)


class FitLoop(_FitLoop):
    """Goes on where ``on_step_done`` or ``on_epoch_done`` saved: no counter is half-way there."""

    def reset(self) -> None:
        torch.set_grad_enabled(True)
        epochs: Any = self.epoch_progress.current
        inside = self._loaded_from_state_dict and epochs.ready > epochs.processed
        _Loop.restarting.fset(self, False)  # type: ignore[attr-defined]  # of all loops within, too
        # As which Lightning does not begin the epoch a second time.
        self._restart_stage = RestartStage.RESTARTED_MID_EPOCH if inside else RestartStage.NONE

    def on_advance_end(self) -> None:
        super().on_advance_end()
        _tell(self.trainer, "on_epoch_done")


class EpochLoop(_TrainingEpochLoop):
    """One epoch, or what is left of it."""

    def reset(self) -> None:
        if not self.trainer.fit_loop.restarted_mid_epoch:
            super().reset()

    def on_run_start(self, data_fetcher: _DataFetcher) -> None:
        super().on_run_start(data_fetcher)
        if self.trainer.fit_loop.restarted_mid_epoch:
            super().on_advance_end(data_fetcher)  # what followed the step after which the run was saved

    def on_advance_end(self, data_fetcher: _DataFetcher) -> None:
        # The last step is followed by an end that can't be taken up in its middle, and comes soon.
        if not self._should_accumulate() and not self.trainer.should_stop:
            _tell(self.trainer, "on_step_done")
        super().on_advance_end(data_fetcher)

    def _broadcast_sigterm_tensor(self) -> None:
        """Nothing; see ``install``."""

    def _on_before_fetch(self) -> None:
        BEAT(self.total_batch_idx + 1, "waits for data")
        super()._on_before_fetch()

    def _on_after_fetch(self) -> None:
        super()._on_after_fetch()
        BEAT(self.total_batch_idx + 1, "computes")

    def teardown(self) -> None:
        super().teardown()
        BEAT.rest()
