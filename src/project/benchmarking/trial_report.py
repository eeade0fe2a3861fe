"""The callback that reports a trial: when each batch ended, where the time went, and how long a forward pass takes."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from project.batch import num_samples
from project.files import write_whole
from project.tracking.facts import num_model_replicas
from project.tracking.tracker import Tracker

WARMUP_CALLS, LEAST_S = 5, 0.2


class TrialReport(Callback):
    """Writes the report on rank 0 when training ends.

    Args:
        report: The file to write.
        batch_sizes: For each, the latency of ``predict_step`` is measured, in inference mode, on one device.
        calls: Measured forward passes of each size.
        warmup_batches: The first ones of the training, that are not measured.
    """

    def __init__(self, report: str, batch_sizes: list[int], calls: int, warmup_batches: int = 0) -> None:
        self.report = report
        self.batch_sizes = batch_sizes
        self.calls = calls
        self.warmup_batches = warmup_batches
        self.ends_s: list[float] = []
        self.epochs: list[int] = []
        self.samples: list[int] = []
        self._batch: Any = None

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step >= trainer.max_steps or len(self.ends_s) + 1 == self.warmup_batches:
            # For the last here, since at the end of training others have work of their own.
            _wait_for(trainer.strategy.root_device)
        self.ends_s.append(time.monotonic())
        self.epochs.append(trainer.current_epoch)
        self.samples.append(num_samples(batch) * num_model_replicas(trainer))
        if self.batch_sizes:
            self._batch = batch

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        latency_ms = {
            size: latencies_ms(trainer, pl_module, self._batch, size, self.calls) for size in self.batch_sizes
        }
        tracker = next((c for c in trainer.callbacks if isinstance(c, Tracker)), None)  # type: ignore[attr-defined]
        if not trainer.is_global_zero:
            return
        report = {"ends_s": self.ends_s, "epochs": self.epochs, "samples": self.samples, "latency_ms": latency_ms}
        if tracker is not None and tracker.ranks is not None:
            ranks = tracker.ranks
            report |= {
                "parts_ms": {name: part.mean().item() for name, part in ranks.parts().items()},
                "memory_bytes": ranks["memory_peak_bytes"].max().item(),
                "device_bytes": _known(ranks["device_peak_bytes"].max().item()),
            }
        if tracker is not None and tracker.diagnosis is not None:
            report["diagnosis"] = asdict(tracker.diagnosis)
        write_whole(Path(self.report), json.dumps(report))


def latencies_ms(trainer: L.Trainer, module: L.LightningModule, batch: Any, size: int, calls: int) -> list[float]:
    """How long forward passes of ``size`` samples take, each, in inference mode and after a warm-up.

    At least ``calls`` of them, and as many as take 0.2 s: fifty short ones would say what the machine did just then.
    """
    batch = with_size(batch, size)
    device = trainer.strategy.root_device
    was_training = module.training
    module.eval()
    times: list[float] = []
    enough = time.perf_counter() + LEAST_S
    with torch.inference_mode(), trainer.precision_plugin.predict_step_context():
        while len(times) < WARMUP_CALLS + calls or time.perf_counter() < enough:
            _wait_for(device)
            begin = time.perf_counter()
            module.predict_step(batch, 0)
            _wait_for(device)
            times.append(1e3 * (time.perf_counter() - begin))
    module.train(was_training)
    return times[WARMUP_CALLS:]


def with_size(batch: Any, size: int) -> Any:
    """A batch of ``size`` samples: the first ones, repeated where there are fewer. Tensors and lists are (B, ...)."""
    if isinstance(batch, dict):
        return {key: with_size(part, size) for key, part in batch.items()}
    if isinstance(batch, tuple):
        return (
            type(batch)(*(with_size(part, size) for part in batch))
            if hasattr(batch, "_fields")
            else tuple(with_size(part, size) for part in batch)
        )
    if isinstance(batch, list) and batch and isinstance(batch[0], Tensor):
        return [with_size(part, size) for part in batch]
    if isinstance(batch, Tensor) and batch.ndim:
        return torch.cat([batch] * math.ceil(size / len(batch)))[:size]
    if isinstance(batch, list) and batch:
        return (batch * math.ceil(size / len(batch)))[:size]
    return batch


def _known(number: float) -> float | None:
    return None if math.isnan(number) else number


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
