"""The callback that measures every rank, gathers the windows, and shows and judges them."""

from __future__ import annotations

import math
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.utilities import rank_zero_warn
from torch.nn.parallel import DistributedDataParallel

from project.tracking.arrivals import KEPT, OWN_GROUP, arrivals
from project.tracking.curves import batch_length
from project.tracking.dashboard import Dashboard
from project.tracking.device_clock import DeviceClock, on_device
from project.tracking.diagnosis import Diagnosis, Facts, diagnose
from project.tracking.phase_profiler import PhaseProfiler
from project.tracking.phases import PhaseClock
from project.tracking.windows import NUM_FIELDS, Window, lateness, merge, summarize_steps

READ_EVERY = {"cpu": 4, "cuda": 20}  # steps; DDP's own times wait for the device where they are read on CUDA
PERSISTS = 5  # windows in a row until a straggler or a starving input is warned of
FEWEST_STEPS = 5  # after the first, to be judged
WARNED_OF = ("straggler", "input")


class Tracker(Callback):
    """Measures where the time of each rank's steps goes, and writes it to TensorBoard.

    Between two windows a rank talks to no other. A window is as many steps as take ``interval_s`` on the slowest
    rank, the same number on all: they agree on it from what they gathered for the last one.

    Args:
        interval_s: Between two windows.
        max_rank_series: With more ranks, only the latest get curves of their own.

    Raises:
        ValueError: an argument is not above 0.
    """

    def __init__(self, interval_s: float = 2.0, max_rank_series: int = 16) -> None:
        if interval_s <= 0:
            raise ValueError(f"interval_s={interval_s} must be above 0: type callbacks.tracker.interval_s=2")
        if max_rank_series <= 0:
            advice = "type callbacks.tracker.max_rank_series=16"
            raise ValueError(f"max_rank_series={max_rank_series} must be above 0: {advice}")
        self.interval_s = interval_s
        self.max_rank_series = max_rank_series
        self.windows: list[list[Window]] = []  # of all ranks, one list a window
        self.diagnosis: Diagnosis | None = None  # of the whole training
        self.clock = PhaseClock()
        self._is_warm = False
        self._window_since_ns = 0
        self._samples = 0
        self._persisting = 0
        self._validations_s: list[float] = []

    # The clocks run between the hooks of Lightning's profiler; here they are set up and stopped.
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        on_cuda = trainer.strategy.root_device.type == "cuda"
        self._device_clock = DeviceClock() if on_cuda else None
        inner: Profiler = trainer.profiler  # type: ignore[attr-defined]
        profiler = PhaseProfiler(inner, self.clock, self._device_clock, self._on_step)
        trainer.profiler = profiler  # type: ignore[attr-defined]
        self._trainer = trainer

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        profiler = trainer.profiler  # type: ignore[attr-defined]
        if isinstance(profiler, PhaseProfiler):
            trainer.profiler = profiler.inner  # type: ignore[attr-defined]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._world_size = trainer.world_size
        # A group of its own: its waiting is in nobody's way, and its collectives are not among those looked at.
        self._group = dist.new_group(backend="gloo", group_desc=OWN_GROUP) if self._world_size > 1 else None
        self._window_ends_after = trainer.log_every_n_steps  # type: ignore[attr-defined]
        self._process = psutil.Process()
        self._cpu_s, self._cpu_at = _cpu_seconds(self._process), time.perf_counter()
        self._sync: list[tuple[float, float]] = []
        self._last_iteration = -1
        self._batches = 0
        self._started_at = time.perf_counter()
        self._trained_s = 0.0
        self._facts = _facts(trainer, pl_module)
        folders = [logger.log_dir for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
        shows = folders and trainer.is_global_zero
        self._dashboard = Dashboard(Path(folders[0]), self.max_rank_series) if shows else None
        model = trainer.strategy.model
        if isinstance(model, DistributedDataParallel) and hasattr(model, "_set_ddp_runtime_logging_sample_rate"):
            model._set_ddp_runtime_logging_sample_rate(READ_EVERY[_kind(trainer)])  # type: ignore[no-untyped-call]

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.clock.pause()
        self._validation_started_at = time.perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._validations_s.append(time.perf_counter() - self._validation_started_at)

    def on_save_checkpoint(self, *_: Any) -> None:
        self.clock.pause()

    def on_train_epoch_end(self, *_: Any) -> None:
        self.clock.pause()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._samples += batch_length(batch)
        self._batches += 1
        if self._batches % READ_EVERY[_kind(trainer)] == 0:
            self._read_ddp(trainer)

    def _on_step(self) -> None:
        """Between two steps; what happens here is part of the next step's other."""
        if not self._is_warm and self.clock.steps:
            self.clock.take()  # the first step warms up, and takes many times as long as any other
            self._samples, self._is_warm = 0, True
            self._window_since_ns = time.time_ns()
        elif len(self.clock.steps) >= self._window_ends_after:
            self._end_window()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.clock.pause()
        self.clock.start_step()  # ends the last
        self.clock.pause()
        # How many steps are left over is the same on all ranks, so all come here or none.
        if self._is_warm and self.clock.steps:
            self._end_window()
        merged = [merge(of_rank) for of_rank in zip(*self.windows, strict=True)]
        if merged and merged[0].steps >= FEWEST_STEPS:
            self.diagnosis = diagnose(merged, self._facts)
            if self._dashboard is not None:
                self._dashboard.write_diagnosis(trainer.global_step, self.diagnosis)
        if self._dashboard is not None:
            self._dashboard.close()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        dashboard = getattr(self, "_dashboard", None)
        if dashboard is not None:
            dashboard.close()

    def _end_window(self) -> None:
        totals, steps = self.clock.take()
        if self._device_clock is not None:
            totals = on_device(totals, self._device_clock.take())
        window = summarize_steps(totals, steps, self._samples)
        self._samples = 0
        self._trained_s += window.wall_s
        now, cpu_s = time.perf_counter(), _cpu_seconds(self._process)
        known = self._sync or [(math.nan, math.nan)]
        sync, overlap = (sum(values) / len(known) for values in zip(*known, strict=True))
        self._sync = []
        on_cuda = self._device_clock is not None
        window = replace(
            window,
            sync=sync,
            overlap=overlap,
            memory_bytes=self._process.memory_info().rss,
            device_bytes=torch.cuda.max_memory_allocated() if on_cuda else math.nan,
            cpu=(cpu_s - self._cpu_s) / max(1e-9, now - self._cpu_at),
        )
        self._cpu_s, self._cpu_at = cpu_s, now
        windows = self._gather(window)
        self._window_since_ns = time.time_ns()
        self.windows.append(windows)
        slowest_s = max(w.wall_s / max(1.0, w.steps) for w in windows)
        fewest = self._trainer.log_every_n_steps  # type: ignore[attr-defined]
        self._window_ends_after = max(fewest, math.ceil(self.interval_s / max(1e-6, slowest_s)))
        if self._dashboard is not None:
            self._dashboard.write(self._trainer.global_step, windows, self._progress(windows))
        self._warn(windows)

    def _gather(self, window: Window) -> list[Window]:
        """The window of every rank, with how late each rank was."""
        if self._group is None:
            return [window]
        # float64 holds today's seconds to a fifth of a microsecond.
        own = torch.tensor([*window.packed(), *self._arrivals()], dtype=torch.float64)
        rows = torch.empty(self._world_size, len(own), dtype=torch.float64)
        dist.all_gather(list(rows), own, group=self._group)
        windows = [Window.unpacked(row[:NUM_FIELDS]) for row in rows.tolist()]
        came = rows[:, NUM_FIELDS:]
        if not (came[:, 0] == came[0, 0]).all():  # nor is NaN
            return windows
        known = ~came[0].isnan()
        late = lateness(came[:, known][:, 1:].tolist())
        return [replace(w, late=share * w.step) for w, share in zip(windows, late, strict=True)]

    def _arrivals(self) -> list[float]:
        several_hosts = self._trainer.num_nodes > 1  # whose clocks differ
        return [math.nan] * (KEPT + 1) if several_hosts else arrivals(self._window_since_ns)

    def _read_ddp(self, trainer: L.Trainer) -> None:
        """How long DDP's communication took in a step, and how much of it was hidden behind the backward pass."""
        model = trainer.strategy.model
        if not isinstance(model, DistributedDataParallel) or not hasattr(model, "_get_ddp_logging_data"):
            return
        data = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        iteration = data.get("iteration", -1)
        if iteration == self._last_iteration or "backward_comm_time" not in data:
            return
        self._last_iteration = iteration
        overlap = data["backward_compute_comm_overlap_time"] / 1e6
        self._sync.append((max(0.0, data["backward_comm_time"] / 1e6 - overlap), overlap))

    def _progress(self, windows: list[Window]) -> dict[str, float]:
        trainer = self._trainer
        wall_s = time.perf_counter() - self._started_at
        values = {"progress/goodput_percent": 100 * self._trained_s / wall_s}
        total = trainer.estimated_stepping_batches
        if math.isfinite(total) and total > 0:
            left = max(0.0, total - trainer.global_step) * trainer.accumulate_grad_batches
            values["progress/percent"] = 100 * min(1.0, trainer.global_step / total)
            step_s = sum(w.wall_s for w in windows) / max(1.0, sum(w.steps for w in windows))
            # Validations to come take as long as those before; the first, which warms up, is left out.
            known = self._validations_s[1:] or self._validations_s
            validation_s = sum(known) / len(known) if known else 0.0
            per_batch = len(self._validations_s) / max(1, self._batches)
            values["progress/remaining_s"] = left * (step_s + per_batch * validation_s)
        return values

    def _warn(self, windows: list[Window]) -> None:
        """Say it once, during the run, where a straggler or a starving input persists."""
        if self._persisting < 0:
            return
        diagnosis = diagnose(windows, self._facts)
        self._persisting = self._persisting + 1 if diagnosis.bound in WARNED_OF else 0
        if self._persisting == PERSISTS:
            self._persisting = -1
            rank_zero_warn("\n".join(diagnosis.lines()))


def _kind(trainer: L.Trainer) -> str:
    return "cuda" if trainer.strategy.root_device.type == "cuda" else "cpu"


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _facts(trainer: L.Trainer, module: L.LightningModule) -> Facts:
    loader = trainer.train_dataloader
    size = getattr(getattr(loader, "sampler", None), "global_batch_size", 0)
    return Facts(
        num_workers=getattr(loader, "num_workers", 0),
        batch_size=size,
        on_gpu=_kind(trainer) == "cuda",
        strategy=type(trainer.strategy).__name__,
        precision=str(trainer.precision),
        compiled=any(part._compiled_call_impl is not None for part in module.modules()),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        ranks_per_host=max(1, trainer.num_devices),
    )
