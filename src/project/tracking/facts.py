"""What a run has set already, for the diagnosis, read from its Trainer."""

from __future__ import annotations

import math
import shutil
from typing import Any

import lightning as L
import torch

from project.compiled import is_compiled
from project.cpu import usable_cores
from project.tracking.progress import Progress
from project.tracking.remedies import Facts

DATA_KEYS = ("num_workers", "prefetch_factor", "pin_memory", "batch_size")


def facts_of(trainer: L.Trainer, module: L.LightningModule) -> Facts:
    """The facts once training starts; the operations of a step are counted later."""
    loader: Any = trainer.train_dataloader
    datamodule = getattr(trainer, "datamodule", None)
    on_gpu = trainer.strategy.root_device.type == "cuda"
    has_compiler = on_gpu or any(map(shutil.which, ("c++", "g++", "clang++", "cl")))
    return Facts(
        num_workers=getattr(loader, "num_workers", 0),
        prefetch_factor=getattr(loader, "prefetch_factor", None),
        pin_memory=getattr(loader, "pin_memory", False),
        batch_size=getattr(getattr(loader, "sampler", None), "global_batch_size", 0),
        num_samples=_length(getattr(loader, "dataset", None)),
        data_keys=frozenset(key for key in DATA_KEYS if hasattr(datamodule, key)),
        on_gpu=on_gpu,
        devices=max(1, trainer.num_devices),
        ranks_here=max(1, trainer.world_size // trainer.num_nodes),
        devices_here=torch.cuda.device_count() if on_gpu else 1,
        several_hosts=trainer.num_nodes > 1,
        strategy=type(trainer.strategy).__name__,
        precision=str(trainer.precision),
        compiled=any(map(is_compiled, module.modules())),
        can_compile="compile" in module.hparams and has_compiler,
        cores=usable_cores(),
        threads=torch.get_num_threads(),
        accumulate=trainer.accumulate_grad_batches,
        automatic=module.automatic_optimization,
        log_every_n_steps=trainer.log_every_n_steps,  # type: ignore[attr-defined]
        run_steps=_steps_of_run(trainer),
    )


def _steps_of_run(trainer: L.Trainer) -> int:
    """Steps of one optimizer until its limits end the run; 0 where none does."""
    progress = progress_of(trainer)
    steps = min(progress.max_steps, progress.max_batches / trainer.accumulate_grad_batches)
    return math.ceil(steps) if math.isfinite(steps) else 0


def _length(dataset: Any) -> int:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):  # a stream
        return 0


def num_model_replicas(trainer: L.Trainer) -> int:
    """Ranks, or groups of ranks that hold one model together, with batches of their own."""
    kwargs = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
    return int(kwargs.get("num_replicas", 1))


def progress_of(trainer: L.Trainer) -> Progress:
    """Where a trainer stands."""
    loop = trainer.fit_loop
    epochs = math.inf if loop.max_epochs is None or loop.max_epochs < 0 else loop.max_epochs
    return Progress(
        batches=loop.epoch_loop.batch_progress.total.ready,
        steps=trainer.global_step,
        max_batches=epochs * trainer.num_training_batches,
        max_steps=trainer.max_steps if trainer.max_steps >= 0 else math.inf,
    )
