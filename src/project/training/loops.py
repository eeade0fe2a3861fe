"""Lightning's loops in fewer calls, with a place between two training steps where a run can be saved and resumed."""

from __future__ import annotations

import re
import warnings
from collections import OrderedDict
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.fetchers import _DataFetcher, _DataLoaderIterDataFetcher
from lightning.pytorch.loops.fit_loop import RestartStage, _FitLoop
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.trainer.states import TrainerFn

from project.launch.heartbeat import BEAT
from project.tracking.between_steps import BetweenSteps
from project.training.step import AutomaticOptimization, Hooks


def install(trainer: L.Trainer) -> None:
    """Give a trainer these loops, and leave signals to ``project.launch.stopping``.

    Lightning's handler of SIGTERM talks to the other ranks from within the signal, where they may be in the middle of
    something else; and to hear of it, each rank waits for rank 0 before every batch.
    """
    theirs = trainer.fit_loop
    own = FitLoop(trainer, theirs.min_epochs, theirs.max_epochs)
    own.epoch_loop = EpochLoop(trainer, theirs.min_steps, theirs.max_steps)
    trainer.fit_loop = own
    install_evaluation(trainer)
    trainer._signal_connector = NoSignals(trainer)


def install_evaluation(trainer: L.Trainer) -> None:
    """The loops of validation and test alone, for a trainer that does not train."""
    trainer.test_loop = EvaluationLoop.like(trainer.test_loop)
    trainer.validate_loop = EvaluationLoop.like(trainer.validate_loop)


def count_exactly(results: Any) -> None:
    """Let means over ranks (``self.log(..., sync_dist=True)``) be over all samples, whatever the ranks' shares.

    Lightning averages the ranks' numbers of samples as integers, which rounds them down: 50 samples on three ranks
    counted as 48, and an accuracy came to 1.02.
    """
    for metric in (results or {}).values():
        if metric.is_tensor and metric.meta.is_mean_reduction:
            metric.cumulated_batch_size = metric.cumulated_batch_size.to(metric.value.dtype)


def expect_of_rank_0(results: Any) -> None:
    """Silence Lightning's advice to pass ``sync_dist=True`` for what only rank 0 was told to log.

    The others do not log it, and would never come to its exchange.
    """
    for metric in (results or {}).values():
        if metric.meta.sync.rank_zero_only:
            text = re.escape(f"It is recommended to use `self.log({metric.meta.name!r}, ")
            warnings.filterwarnings("ignore", text)


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
        count_exactly(self.epoch_loop._results)
        expect_of_rank_0(self.epoch_loop._results)
        steps = self.epoch_loop
        assert isinstance(steps.automatic_optimization, AutomaticOptimization)
        steps.automatic_optimization.check_trains(steps.batch_progress.current.ready)
        super().on_advance_end()
        _tell(self.trainer, "on_epoch_done")


class EpochLoop(_TrainingEpochLoop):
    """One epoch, or what is left of it."""

    _takes_batch_idx: bool | None = None  # of the model's training_step
    _is_validated: bool | None = None  # the epoch that is under way

    def __init__(self, trainer: L.Trainer, min_steps: int | None = None, max_steps: int = -1) -> None:
        super().__init__(trainer, min_steps, max_steps)
        self.automatic_optimization: AutomaticOptimization = AutomaticOptimization(trainer)
        self.val_loop = EvaluationLoop.like(self.val_loop)

    def reset(self) -> None:
        if not self.trainer.fit_loop.restarted_mid_epoch:
            super().reset()

    def on_run_start(self, data_fetcher: _DataFetcher) -> None:
        super().on_run_start(data_fetcher)
        self._hooks = Hooks(self.trainer)
        self.automatic_optimization.prepare(self._hooks)
        self._is_validated = super()._should_check_val_epoch()
        if self.trainer.fit_loop.restarted_mid_epoch:
            super().on_advance_end(data_fetcher)  # what followed the step after which the run was saved

    def advance(self, data_fetcher: _DataFetcher) -> None:
        if isinstance(data_fetcher, _DataLoaderIterDataFetcher):  # training_step fetches its batches itself
            super().advance(data_fetcher)
            return
        hooks, progress = self._hooks, self.batch_progress
        batch, _, _ = next(data_fetcher)
        batch_idx = progress.current.ready
        progress.is_last_batch = data_fetcher.done
        batch = hooks.transferred(batch)
        progress.increment_ready()
        self._begin_logging(batch)

        output: Any = None
        leaves_epoch = False
        if batch is None:
            self._warning_cache.warn("train_dataloader yielded None. If this was on purpose, ignore this warning...")
        else:
            leaves_epoch = hooks("on_train_batch_start", batch, batch_idx) == -1
            hooks.of_strategy("on_train_batch_start", batch, batch_idx)
            if leaves_epoch:
                progress.increment_by(0, is_last_batch=True)
            else:
                progress.increment_started()
                output = self._optimized(batch, batch_idx)
        progress.increment_processed()

        self.update_lr_schedulers("step", update_plateau_schedulers=False)
        if self._num_ready_batches_reached():
            self.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        if leaves_epoch:
            raise StopIteration
        hooks("on_train_batch_end", output, batch, batch_idx)
        self._end_logging()

    def _optimized(self, batch: Any, batch_idx: int) -> Any:
        """What a step returns."""
        trainer = self.trainer
        arguments = self._build_kwargs(OrderedDict(), batch, batch_idx)
        with trainer.profiler.profile("run_training_batch"):
            if trainer.lightning_module.automatic_optimization:
                return self.automatic_optimization.run(trainer.optimizers[0], batch_idx, arguments)
            return self.manual_optimization.run(arguments)

    def _begin_logging(self, batch: Any) -> None:
        connector, results = self.trainer._logger_connector, self._results
        connector._first_loop_iter = connector._first_loop_iter is None
        results.batch, results.batch_size, results.dataloader_idx = batch, None, None

    def _end_logging(self) -> None:
        """Lightning collects what was logged in each step, also where nothing was."""
        connector, results = self.trainer._logger_connector, self._results
        if results:
            connector.on_batch_end()
        results.batch = results.batch_size = None
        self.batch_progress.increment_completed()
        if results:
            connector.update_train_step_metrics()

    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        kind = (interval, update_plateau_schedulers)
        due = [c for c in self.trainer.lr_scheduler_configs if (c.interval, c.reduce_on_plateau) == kind]
        if update_plateau_schedulers and due:
            super().update_lr_schedulers(interval, update_plateau_schedulers)  # which looks for the metric
            return
        if not due or not self.trainer.lightning_module.automatic_optimization:
            return
        if interval == "step" and self._should_accumulate():
            return
        number = 1 + (self.batch_idx if interval == "step" else self.trainer.current_epoch)
        for config in due:
            if number % config.frequency == 0:
                self.scheduler_progress.increment_ready()
                self._hooks.of_module("lr_scheduler_step", config.scheduler, None)
                self.scheduler_progress.increment_completed()

    def _should_check_val_epoch(self) -> bool:
        # Lightning looks for the hooks of validation in each step.
        return super()._should_check_val_epoch() if self._is_validated is None else self._is_validated

    def on_advance_end(self, data_fetcher: _DataFetcher) -> None:
        # The last step is followed by an end that can't be taken up in its middle, and comes soon.
        if not self._should_accumulate() and not self.trainer.should_stop:
            _tell(self.trainer, "on_step_done")
        super().on_advance_end(data_fetcher)

    def _build_kwargs(self, kwargs: OrderedDict[str, Any], batch: Any, batch_idx: int) -> OrderedDict[str, Any]:
        # Lightning looks at the signature of training_step in each step: 1.65 ms of a tiny net's against 1.41.
        if self._takes_batch_idx is None:
            self._takes_batch_idx = "batch_idx" in super()._build_kwargs(OrderedDict(), batch, batch_idx)
        kwargs["batch"] = batch
        if self._takes_batch_idx:
            kwargs["batch_idx"] = batch_idx
        return kwargs

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
        self._is_validated = None
        BEAT.rest()


class EvaluationLoop(_EvaluationLoop):
    """Validation, or the test."""

    @classmethod
    def like(cls, theirs: _EvaluationLoop) -> EvaluationLoop:
        return cls(theirs.trainer, theirs._trainer_fn, theirs._stage, theirs.verbose, theirs.inference_mode)

    def reset(self) -> None:
        if self.trainer.state.fn == TrainerFn.FITTING and not self.trainer.sanity_checking:
            _tell(self.trainer, "on_validation_due")
        super().reset()

    def on_run_start(self) -> None:
        super().on_run_start()
        self._hooks = Hooks(self.trainer)
        self._step = "test_step" if self.trainer.testing else "validation_step"
        stage = "test" if self.trainer.testing else "validation"
        self._on_start, self._on_end = f"on_{stage}_batch_start", f"on_{stage}_batch_end"
        first = self._build_step_args_from_hook_kwargs(OrderedDict(batch=None, batch_idx=0), self._step)
        self._takes_batch_idx = len(first) == 2
        self._beat()

    def on_run_end(self) -> list[Any]:
        outputs: list[Any] = super().on_run_end()
        if self.trainer.testing or self.trainer.sanity_checking:
            BEAT.rest()
        return outputs

    def _beat(self) -> None:
        BEAT(self.trainer.global_step, "tests" if self.trainer.testing else "validates")

    def _store_dataloader_outputs(self) -> None:
        count_exactly(self._results)
        expect_of_rank_0(self._results)
        super()._store_dataloader_outputs()

    def _evaluation_step(self, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any) -> None:
        self._beat()
        if dataloader_iter is not None or self.num_dataloaders > 1:
            super()._evaluation_step(batch, batch_idx, dataloader_idx, dataloader_iter)
            return
        hooks, progress, connector = self._hooks, self.batch_progress, self.trainer._logger_connector
        batch = hooks.transferred(batch)
        progress.increment_ready()
        connector.on_batch_start(batch)
        hooks(self._on_start, batch, batch_idx)
        progress.increment_started()
        arguments = (batch, batch_idx) if self._takes_batch_idx else (batch,)
        output = hooks.of_strategy(self._step, *arguments)
        progress.increment_processed()
        hooks(self._on_end, output, batch, batch_idx)
        results: Any = self._results
        if results:
            connector.on_batch_end()
        results.batch = results.batch_size = None
        progress.increment_completed()
        if self.trainer.sanity_checking:
            return
        self._has_run = True
        if results:
            connector.update_eval_step_metrics(self._seen_batches_per_dataloader[dataloader_idx])
        self._seen_batches_per_dataloader[dataloader_idx] += 1
