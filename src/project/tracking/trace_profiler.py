"""The callback that records traces of training steps, planned ones and those that a running job is asked for."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.profilers import PyTorchProfiler

from project.errors import UserError
from project.notices import notice
from project.tracking.facts import progress_of
from project.tracking.phase_profiler import PhaseProfiler
from project.tracking.traces import Recorder, TracePlan

VIEWER = "https://ui.perfetto.dev"
MOST_TABLES = 16  # of as many ranks


@dataclass
class _Pending:
    """A trace to come, or under way; its steps are the same on all ranks."""

    plan: TracePlan
    traces_left: int
    warms_up_at: int | None = None  # counted from the first moment between two steps
    first: int = 0  # of the steps that are recorded, once it is under way


@dataclass(frozen=True)
class _Recorded:
    """What came of a rank's trace: its table, or why there is none."""

    rank: int
    table: str = ""
    failure: str = ""


class TraceProfiler(Callback):
    """Writes ``<folder>/rank_003_step_000120.json.gz``, a trace of some steps from number 120 on, for Perfetto.

    Steps are the optimizer's, counted as by the loggers. All ranks agree on them without a message; where a trace ends,
    the ranks meet once, and rank 0 tells of it. Its heaviest operations are a table for the loggers that take texts.

    Args:
        folder: Of the files.
        rows: Operations in the table.
        plan: See `TracePlan`; ``ranks`` as a list. With ``repeat=0`` traces are recorded when they are asked for.

    Raises:
        UserError: a value can't be, a rank is not there, or another profiler is chosen.
    """

    def __init__(self, folder: str | Path, rows: int = 20, **plan: Any) -> None:
        self.folder = Path(folder)
        self.rows = rows
        self.plan = TracePlan().changed(plan)
        self._pending: list[_Pending] = []
        self._current: _Pending | None = None
        self._recorder: Recorder | None = None
        self._failure = ""
        self._has_disturbed = False

    def ask(self, plan: TracePlan) -> None:
        """Take up a plan from the next step on, or after the trace that is under way; for all ranks."""
        self._pending.append(_Pending(plan, plan.repeat))

    def has_disturbed(self) -> bool:
        """Whether a step since the last call was slower than others, or may have been, for a trace's sake."""
        told, self._has_disturbed = self._has_disturbed, self._current is not None
        return told

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        check_plan(self.plan, trainer)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._pending = []
        if not self.plan.repeat:
            return
        needed, left = self.plan.wait + self.plan.warmup + self.plan.active, progress_of(trainer).batches_left()
        if needed > left:
            notice(
                f"No trace will be written: callbacks.profiler.wait={self.plan.wait}, with {self.plan.warmup} steps of "
                f"warmup and {self.plan.active} active ones, asks for {needed} steps, and training has {left:.0f}: "
                "type callbacks.profiler.wait=0, or let it train longer"
            )
            return
        self.ask(self.plan)
        self._between_steps(trainer, trainer.fit_loop.epoch_loop._batches_that_stepped)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        loop = trainer.fit_loop.epoch_loop
        if self._pending and not loop._should_accumulate():
            self._between_steps(trainer, loop._batches_that_stepped + 1)  # which is counted later

    # Of a validation between two steps nothing is recorded.
    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._recorder is not None:
            self._recorder.record(False)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._recorder is not None:
            self._recorder.record(True)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._drop(trainer)
        if self._pending:
            steps = trainer.fit_loop.epoch_loop._batches_that_stepped
            notice(f"Training ended after {steps} steps, before a trace that was asked for was complete")
        self._pending = []

    def on_exception(self, trainer: L.Trainer, *_: Any) -> None:
        self._drop(trainer)

    def _between_steps(self, trainer: L.Trainer, step: int) -> None:
        """``step`` is the number of the next; on all ranks alike."""
        for pending in self._pending:
            if pending.warms_up_at is None:
                pending.warms_up_at = step + pending.plan.wait
        if self._current is not None and step >= self._current.first + self._current.plan.active:
            self._finish(trainer, self._current, step)
            self._current = None
        if self._current is None:
            self._current = next(
                (p for p in self._pending if p.warms_up_at is not None and p.warms_up_at <= step), None
            )
            if self._current is not None:
                self._current.first = step + self._current.plan.warmup
                self._begin(trainer, self._current.plan)
        if self._current is not None and step >= self._current.first:
            self._record(trainer, step)

    def _begin(self, trainer: L.Trainer, plan: TracePlan) -> None:
        self._has_disturbed = True
        self._failure = ""
        if not plan.records(trainer.global_rank):
            return
        try:
            self._recorder = Recorder(plan, trainer.strategy.root_device.type == "cuda")
        except RuntimeError as error:  # another profiler is at work, as one of the user's
            self._failure = " ".join(str(error).split())

    def _record(self, trainer: L.Trainer, step: int) -> None:
        if self._recorder is None:
            return
        try:
            self._recorder.begin_step(step)
        except RuntimeError as error:
            self._failure = " ".join(str(error).split())
            self._recorder = None
            return
        self._name_phases(trainer)

    def _name_phases(self, trainer: L.Trainer) -> None:
        """Let a trace show the parts of a step, where they are measured anyway."""
        profiler = trainer.profiler  # type: ignore[attr-defined]
        if isinstance(profiler, PhaseProfiler):
            profiler.spans = None if self._recorder is None else self._recorder.spans

    def _finish(self, trainer: L.Trainer, pending: _Pending, step: int) -> None:
        own = self._write(trainer, pending) if pending.plan.records(trainer.global_rank) else None
        recorded: list[_Recorded | None] = [own]
        if trainer.world_size > 1:
            recorded = [None] * trainer.world_size
            dist.all_gather_object(recorded, own)
        if trainer.is_global_zero:
            self._tell(trainer, pending, [one for one in recorded if one is not None])
        pending.traces_left -= 1
        pending.warms_up_at = step + pending.plan.wait
        if pending.traces_left == 0:
            self._pending.remove(pending)

    def _write(self, trainer: L.Trainer, pending: _Pending) -> _Recorded:
        rank, recorder = trainer.global_rank, self._recorder
        self._recorder = None
        self._name_phases(trainer)
        if recorder is None:
            return _Recorded(rank, failure=self._failure)
        try:
            recorder.end()
            recorder.save(self.folder / f"rank_{rank:03}_step_{pending.first:06}.json.gz")
        except (OSError, RuntimeError) as error:
            return _Recorded(rank, failure=getattr(error, "strerror", None) or " ".join(str(error).split()))
        return _Recorded(rank, table=recorder.table(self.rows))

    def _tell(self, trainer: L.Trainer, pending: _Pending, recorded: list[_Recorded]) -> None:
        first, last = pending.first, pending.first + pending.plan.active - 1
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        for one in recorded:
            if one.failure:
                notice(f"The trace of {steps} of rank {one.rank} was not written: {one.failure}")
        written = [one for one in recorded if not one.failure]
        if not written:
            return
        name = f"{written[0].rank:03}" if len(written) == 1 else "*"
        whose = f"rank {written[0].rank}" if len(written) == 1 else f"{len(written)} ranks"
        path = self.folder / f"rank_{name}_step_{first:06}.json.gz"
        print(f"Trace of {steps} of {whose}: {path}, to be opened in {VIEWER}", flush=True)
        for one in written[:MOST_TABLES]:
            as_it_is = "\n".join(f"    {line}" for line in one.table.splitlines())  # Markdown's block of code
            for logger in trainer.loggers:
                if hasattr(logger, "add_text"):
                    logger.add_text(f"trace/rank_{one.rank:03}", as_it_is, first)

    def _drop(self, trainer: L.Trainer) -> None:
        """End a trace that is not complete, without a file."""
        recorder, self._recorder, self._current = self._recorder, None, None
        self._name_phases(trainer)
        if recorder is not None:
            with suppress(RuntimeError):
                recorder.end()


def check_plan(plan: TracePlan, trainer: L.Trainer) -> None:
    """Check that a training can be traced as a plan says.

    Raises:
        UserError: a rank is not there, or the profiler is at work already.
    """
    plan.check_ranks(trainer.world_size)
    profiler: Any = trainer.profiler  # type: ignore[attr-defined]
    if isinstance(getattr(profiler, "inner", profiler), PyTorchProfiler):
        raise UserError(
            "trainer.profiler=pytorch records all the time with the profiler that traces need, and it can't be shared: "
            "type trainer.profiler=null"
        )
