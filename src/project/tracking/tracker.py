"""The callback that measures every rank, gathers the windows, and shows and judges them."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.profilers import Profiler
from torch import Tensor

from project.batch import num_samples
from project.errors import UserError
from project.notices import notice
from project.tracking.arrivals import OWN_GROUP, Arrivals, Marks, arrivals
from project.tracking.between_steps import BetweenSteps
from project.tracking.dashboard import Dashboard
from project.tracking.ddp_times import DDPTimes, TimedBuffers
from project.tracking.device_clock import DeviceClock, on_device
from project.tracking.diagnosis import Diagnosis
from project.tracking.facts import facts_of, num_model_replicas, progress_of
from project.tracking.fsdp_times import TimedShards
from project.tracking.machine import Machine, peak_flops_per_s
from project.tracking.operations import OperationCost, count_operations
from project.tracking.overview import Overview
from project.tracking.phase_profiler import PhaseProfiler
from project.tracking.phases import PhaseClock
from project.tracking.replicas import Replicas
from project.tracking.trace_profiler import TraceProfiler, check_plan
from project.tracking.traces import Demand, TracePlan, demanded
from project.tracking.windows import NUM_FIELDS, Ranks, Window, summarize_steps

READ_EVERY = {"cpu": 10, "cuda": 20}  # steps; DDP's own times wait for the device where they are read on CUDA
PICTURES_EVERY_S = 300.0  # while training stands still anyway


class Tracker(Callback, BetweenSteps):
    """Measures where the time of each rank's steps goes, and writes it to TensorBoard.

    Between two windows a rank talks to no other. A window is as many steps as take ``interval_s`` on the slowest
    rank, the same number on all: they agree on it from what they gathered for the last one.

    A model that has ``tokens_in(batch) -> int`` has its tokens counted, and one with ``flops_per_sample`` its FLOPs;
    else a step of N parameters is taken for 6 N FLOPs a token, without attention (https://arxiv.org/abs/2204.02311,
    appendix B).

    A file ``profile`` in the run folder, looked for once a window, asks for a trace; see `TraceProfiler`.

    Args:
        interval_s: Between two windows.
        max_rank_series: With more ranks, only so many of them get curves of their own.

    Raises:
        ValueError: an argument is not above 0.
    """

    def __init__(self, interval_s: float = 5.0, max_rank_series: int = 16) -> None:
        if interval_s <= 0:
            raise ValueError(f"interval_s={interval_s} must be above 0: type callbacks.tracker.interval_s=5")
        if max_rank_series <= 0:
            advice = "type callbacks.tracker.max_rank_series=16"
            raise ValueError(f"max_rank_series={max_rank_series} must be above 0: {advice}")
        self.interval_s = interval_s
        self.max_rank_series = max_rank_series
        self.diagnosis: Diagnosis | None = None  # of the whole training, on rank 0
        self.clock = PhaseClock()
        self._profiler: PhaseProfiler | None = None
        self._overview: Overview | None = None  # on rank 0
        self._timed: list[TimedBuffers | TimedShards] = []

    # The clocks run between the hooks of Lightning's profiler; here they are set up and stopped.
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._restore(trainer)
        on_cuda = trainer.strategy.root_device.type == "cuda"
        self.clock, self._marks = PhaseClock(), Marks()
        self._device_clock = DeviceClock() if on_cuda else None
        inner: Profiler = trainer.profiler  # type: ignore[attr-defined]
        self._profiler = PhaseProfiler(inner, self.clock, self._marks, self._device_clock, self._on_step)
        trainer.profiler = self._profiler  # type: ignore[attr-defined]
        self._replicas = Replicas()
        if getattr(trainer.strategy, "observe_replica", self) is None:  # of dp, and free
            trainer.strategy.observe_replica = self._replicas.observe  # type: ignore[attr-defined]
        self._trainer = trainer
        self._is_warm = False
        self._samples, self._tokens, self._batches = 0, 0.0, 0
        self._validations_s: list[float] = []
        self._validation_due_at = 0.0  # where one is under way
        self._overview = self.diagnosis = None

    def switch(self, trainer: L.Trainer, on: bool) -> None:
        """Measure, or neither measure nor cost anything, from the next step of the training on; the same on all ranks.

        Steps that are not measured are in no curve and no verdict.
        """
        assert self._profiler is not None, "no training is under way"
        self._pause()
        self._ddp.switch(on)
        trainer.profiler = self._profiler if on else self._profiler.inner  # type: ignore[attr-defined]
        # A list of its own: a hook's may be at work.
        others = [callback for callback in trainer.callbacks if callback is not self]  # type: ignore[attr-defined]
        trainer.callbacks = [self, *others] if on else others  # type: ignore[attr-defined]

    @property
    def ranks(self) -> Ranks | None:
        """The whole training as one window, on rank 0."""
        return None if self._overview is None else self._overview.ranks

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._restore(trainer)

    def _restore(self, trainer: L.Trainer) -> None:
        """Leave the Trainer as it was: also after an error, and before another training."""
        profiler = trainer.profiler  # type: ignore[attr-defined]
        if isinstance(profiler, PhaseProfiler):
            trainer.profiler = profiler.inner  # type: ignore[attr-defined]
        if self._profiler is not None and getattr(trainer.strategy, "observe_replica", None) == self._replicas.observe:
            trainer.strategy.observe_replica = None  # type: ignore[attr-defined]
        for timed in self._timed:
            timed.remove()
        if self._overview is not None and self._overview.dashboard is not None:
            self._overview.dashboard.close()
            self._overview.dashboard = None
        self._profiler, self._timed = None, []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        device = trainer.strategy.root_device
        world_size = trainer.world_size
        # A group of its own: its waiting is in nobody's way, and its collectives are not among those looked at.
        self._group = dist.new_group(backend="gloo", group_desc=OWN_GROUP) if world_size > 1 else None
        hosts = [socket.gethostname()] * world_size
        if self._group is not None:
            dist.all_gather_object(hosts, hosts[0], group=self._group)
        self._fewest = max(1, trainer.log_every_n_steps)  # type: ignore[attr-defined]
        self._window_ends_after = self._fewest
        self._machine = Machine(device, notice)
        self._read_every = READ_EVERY["cuda" if device.type == "cuda" else "cpu"]
        self._ddp = DDPTimes(trainer.strategy.model, self._read_every)
        model = trainer.strategy.model
        self._timed = [TimedBuffers(model, self._phase), TimedShards(model, self._phase, on_cpu=device.type == "cpu")]
        self._started_at = self._pictures_at = time.perf_counter()
        self._trained_s = 0.0
        self._steps_before = trainer.global_step
        self._facts = facts_of(trainer, pl_module)
        self._tokens_in: Callable[[Any], int] | None = getattr(pl_module, "tokens_in", None)
        self._num_replicas = num_model_replicas(trainer)
        self._peak = peak_flops_per_s(device) * trainer.num_devices * trainer.num_nodes
        self._operation_cost = OperationCost()
        self._traces = next((c for c in trainer.callbacks if isinstance(c, TraceProfiler)), None)  # type: ignore[attr-defined]
        self._demand = Demand(Path(trainer.default_root_dir) / "profile") if trainer.is_global_zero else None
        boards = [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
        others = [logger for logger in trainer.loggers if logger not in boards]
        folder = Path(boards[0].log_dir) if boards else None
        if trainer.is_global_zero:
            shows = Dashboard(folder, self.max_rank_series, self._num_replicas, loggers=others)
            self._overview = Overview(notice, shows if trainer.loggers else None, hosts)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        profiler = self._profiler
        if profiler is None:
            yield
            return
        profiler.enter(name)
        try:
            yield
        finally:
            profiler.leave(name)

    # What follows these is no training until the next step.
    def on_validation_due(self, trainer: L.Trainer) -> None:
        # Its loaders' workers start before Lightning says that it starts.
        self._pause()
        self._validation_due_at = time.perf_counter()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._pause()
        self._validation_due_at = self._validation_due_at or time.perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        due_at, self._validation_due_at = self._validation_due_at, 0.0
        if trainer.sanity_checking or self._profiler is None:
            return
        self._validations_s.append(time.perf_counter() - due_at)
        if time.perf_counter() - self._pictures_at > PICTURES_EVERY_S:
            self._judge()

    def on_save_checkpoint(self, *_: Any) -> None:
        self._pause()

    def on_train_epoch_end(self, *_: Any) -> None:
        self._pause()

    def _pause(self) -> None:
        if self._profiler is not None:
            self._profiler.pause()

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        if self._profiler is None:
            return
        # On a GPU the host only queues them.
        if self._is_warm and not self._facts.on_gpu and not self._operation_cost.is_known:
            self._operation_cost.measure()
            number = self._facts.num_operations or count_operations(loss)
            self._facts = replace(self._facts, num_operations=number, operation_us=self._operation_cost.us)
        if not self._facts.automatic:  # else Lightning marks it
            self._profiler.enter("backward")

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._profiler is not None and not self._facts.automatic:
            self._profiler.leave("backward")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._samples += num_samples(batch)
        self._tokens += math.nan if self._tokens_in is None else self._tokens_in(batch)
        self._batches += 1
        if self._batches % self._read_every == 0:
            self._ddp.read()

    def _on_step(self) -> None:
        """Between two steps; what happens here is part of the next step's other."""
        is_traced = self._traces is not None and self._traces.has_disturbed()
        if is_traced or (not self._is_warm and self.clock.steps):
            self._begin()  # the first step warms up, and takes many times as long as any other
        elif len(self.clock.steps) >= self._window_ends_after:
            self._end_window()

    def _begin(self) -> None:
        self._is_warm = True
        self.clock.take()
        if self._device_clock is not None:
            self._device_clock.drop()
        self._ddp.take(1.0)
        self._replicas.take(1)
        self._samples, self._tokens = 0, 0.0
        self._steps_before = self._trainer.global_step
        self._marks.begin_window()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._pause()
        self.clock.start_step()  # ends the last
        self.clock.pause()
        # How many steps are left over is the same on all ranks, so all come here or none.
        self._demand = None  # no steps are left to be traced
        if self._is_warm and self.clock.steps:
            if self._device_clock is not None:
                torch.cuda.synchronize()  # once, so that the last steps are told
            self._end_window()
        self._judge()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if self._profiler is not None:
            with suppress(Exception):  # the error that ended the training is the one to be told
                self._judge()
        with suppress(Exception):
            self._restore(trainer)

    def _end_window(self) -> None:
        window, came = self._own_window(), self._arrivals()
        # float64 holds today's seconds to a fifth of a microsecond.
        is_asked = self._demand is not None and self._demand.is_there()
        own = torch.tensor([*window.packed(), *came.packed(), is_asked], dtype=torch.float64)
        rows = own[None]
        if self._group is not None:
            rows = torch.empty(self._trainer.world_size, len(own), dtype=torch.float64)
            dist.all_gather(list(rows), own, group=self._group)
        self._marks.begin_window()
        ranks = Ranks(rows[:, :NUM_FIELDS])
        slowest_s = float((ranks["wall_s"] / ranks["steps"].clamp(min=1)).max())
        self._window_ends_after = max(self._fewest, math.ceil(self.interval_s / max(1e-6, slowest_s)))
        if self._overview is not None:
            self._overview.add(self._step(), rows[:, :-1], came, self._facts, self._of_run, self._replicas_ms)
        if bool(rows[:, -1].any()):
            self._ask_for_trace()

    def _ask_for_trace(self) -> None:
        """Let all ranks trace what rank 0's file asks for."""
        told: list[TracePlan | None] = [None]
        if self._demand is not None:
            usual = TracePlan() if self._traces is None else replace(self._traces.plan, wait=0, repeat=1)
            try:
                plan = demanded(self._demand.take(), usual)
                check_plan(plan, self._trainer)
                told = [plan]
            except UserError as error:
                notice(str(error))
        if self._group is not None:
            dist.broadcast_object_list(told, src=0, group=self._group)
        if told[0] is None:
            return
        if self._traces is None:
            self._traces = TraceProfiler(Path(self._trainer.default_root_dir) / "traces", repeat=0)
            # A list of its own: a hook's may be at work.
            self._trainer.callbacks = [*self._trainer.callbacks, self._traces]  # type: ignore[attr-defined]
        self._traces.ask(told[0])

    def _own_window(self) -> Window:
        totals, steps = self.clock.take()
        if self._device_clock is not None:
            totals = on_device(totals, self._device_clock.take())
        window = summarize_steps(totals, steps, self._samples)
        optimizer_steps = self._trainer.global_step - self._steps_before
        sync, overlap = self._ddp.take(optimizer_steps / max(1, len(steps)))
        window = replace(window, sync=sync, overlap=overlap, tokens=self._tokens, **self._machine.read())
        self._replicas_ms = self._replicas.take(len(steps))
        self._samples, self._tokens = 0, 0.0
        self._steps_before = self._trainer.global_step
        self._trained_s += window.wall_s
        return window

    def _arrivals(self) -> Arrivals:
        several_hosts = self._trainer.num_nodes > 1  # whose clocks differ
        return Arrivals() if several_hosts or self._group is None else arrivals(self._marks)

    def _step(self) -> int:
        """As Lightning's loggers count: also with several optimizers one a batch."""
        return int(self._trainer.fit_loop.epoch_loop._batches_that_stepped)

    def _judge(self) -> None:
        """Judge the training until now, on rank 0."""
        self._pictures_at = time.perf_counter()
        if self._overview is not None:
            self.diagnosis = self._overview.judge(self._step(), self._facts)

    def _of_run(self, ranks: Ranks) -> dict[str, float]:
        """Progress, goodput, and how much of the devices' peak is used."""
        trainer = self._trainer
        progress = progress_of(trainer)
        batch_s = float(ranks["wall_s"].sum() / ranks["steps"].sum().clamp(min=1))
        wall_s = time.perf_counter() - self._started_at
        return {
            "progress/goodput_percent": 100 * self._trained_s / wall_s,
            "progress/percent": 100 * progress.share(),
            "progress/remaining_s": progress.remaining_s(batch_s, self._validations_s, self._batches),
            "speed/mfu_percent": 100 * self._flops_per_s(ranks) / self._peak,
        }

    def _flops_per_s(self, ranks: Ranks) -> float:
        module = self._trainer.lightning_module
        share = self._num_replicas / len(ranks)  # ranks that share a model compute the same samples
        per_sample = getattr(module, "flops_per_sample", None)
        if per_sample is not None:
            return float(per_sample) * share * float((ranks["samples"] / ranks["wall_s"]).sum())
        parameters = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
        return 6 * parameters * share * float((ranks["tokens"] / ranks["wall_s"]).sum())
