"""What ranks hold besides weights and optimizers: random numbers, metrics that are under way, DDP's buckets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from project.launch.run_state import record_first_step
from project.strategies.ddp_buckets import Buckets, begin_with, buckets_of
from project.strategies.random_state import random_state, set_random_state
from project.tracking.between_steps import BetweenSteps
from project.training.seeding import seed_rank

KEY = "ranks"
State = dict[str, Any]


class RankStates(Callback, BetweenSteps):
    """Gives each rank random numbers of its own when training starts, and keeps them in checkpoints.

    Dropout and noise must not repeat over the ranks, and a run that goes on must draw what it would have drawn. Not
    earlier than at the start of training: the model may be built as late as in ``configure_model``, from the same seed
    everywhere, and Lightning seeds all ranks alike when it sets up a strategy.

    Kept are also what torchmetrics objects and means over the epoch have summed up so far, the last logged values, and
    of each callback what its ``rank_state()`` returns, plain data that it gets back by ``load_rank_state(state)``.

    Args:
        seed: Of the run.

    Attributes:
        logged: The last values of the metrics before the run went on; empty in a new run.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.logged: dict[str, float] = {}
        self._loaded: State | None = None
        self._results: dict[str, dict[str, Tensor]] = {}  # of the epoch so far, to be added to its next batch's
        self._of_callbacks: State = {}
        self._before_validation: State | None = None
        self._buckets: Buckets | None = None
        self._has_stepped = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        loaded, self._loaded = self._loaded, None
        if loaded is None:
            seed_rank(self.seed, trainer.global_rank)
            return
        trainer._logger_connector._callback_metrics.update(
            {name: torch.tensor(value, dtype=torch.float64) for name, value in self.logged.items()}
        )
        # What was not saved, and so the generators of a device of another kind; not the same as from the start.
        seed_rank(self.seed + 7919 * trainer.global_step, trainer.global_rank)
        if len(loaded["of_ranks"]) == trainer.world_size:
            self._restore(trainer, pl_module, loaded["of_ranks"][trainer.global_rank])
            return
        # Nobody can say what other ranks would have drawn.
        if trainer.is_global_zero:
            print(
                f"Saved by {len(loaded['of_ranks'])} rank(s), the run goes on with {trainer.world_size}: the batches "
                "are the same, random numbers (dropout, augmentation) are others, and metrics of an epoch under way "
                "count from here",
                flush=True,
            )

    def on_validation_due(self, trainer: L.Trainer) -> None:
        self._before_validation = self._state(trainer, trainer.lightning_module)

    def on_validation_end(self, *_: Any) -> None:
        self._before_validation = None

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if self._of_callbacks:  # all have begun by now
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                if hasattr(callback, "load_rank_state") and callback.state_key in self._of_callbacks:
                    callback.load_rank_state(self._of_callbacks[callback.state_key])
            self._of_callbacks = {}

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if not self._has_stepped:
            self._has_stepped = True
            if trainer.is_global_zero:
                record_first_step(Path(trainer.default_root_dir))
        for key in list(self._results):
            result = trainer.fit_loop.epoch_loop._results.get(key)
            if result is not None:
                _add(result, **self._results.pop(key))

    def on_train_epoch_end(self, *_: Any) -> None:
        self._results = {}

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: State) -> None:
        own = self._before_validation or self._state(trainer, pl_module)
        of_ranks: list[Any] = [own]
        if trainer.world_size > 1:
            of_ranks = [None] * trainer.world_size
            dist.gather_object(own, of_ranks if trainer.is_global_zero else None, dst=0)
        logged = {name: float(value) for name, value in trainer.callback_metrics.items() if value.numel() == 1}
        # A stop that the length of the run brought is none for a run that goes on with another length.
        by_length = 0 <= trainer.max_steps <= trainer.global_step
        stops = trainer.should_stop and not by_length
        self._buckets = buckets_of(trainer.strategy.model) or self._buckets
        checkpoint[KEY] = {"of_ranks": of_ranks, "logged": logged, "stops": stops, "buckets": self._buckets}

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: State) -> None:
        if trainer.state.fn != TrainerFn.FITTING or KEY not in checkpoint:
            return
        self._loaded = checkpoint[KEY]
        self.logged = self._loaded["logged"]
        trainer.num_sanity_val_steps = 0
        trainer.should_stop = self._loaded["stops"]
        if buckets := self._loaded.get("buckets"):  # those of older runs are not in their checkpoints
            self._buckets = buckets
            begin_with(trainer.strategy, buckets)

    def _state(self, trainer: L.Trainer, module: L.LightningModule) -> State:
        results = trainer.fit_loop.epoch_loop._results
        return {
            "random": _plain(random_state(*_devices(trainer))),
            "metrics": _metrics(module),
            "results": {
                key: {name: _copied(getattr(result, name)) for name in result._defaults}
                for key, result in results.items()
                if result.meta.on_epoch and result.is_tensor
            },
            "callbacks": {
                callback.state_key: callback.rank_state()
                for callback in trainer.callbacks  # type: ignore[attr-defined]
                if hasattr(callback, "rank_state")
            },
        }

    def _restore(self, trainer: L.Trainer, module: L.LightningModule, state: State) -> None:
        device = trainer.strategy.root_device
        set_random_state(_unplain(state["random"]), *_devices(trainer))
        parts = dict(module.named_modules())
        for name, values in state["metrics"].items():
            if isinstance(metric := parts.get(name), Metric):
                _restore_metric(metric, values, device)
        self._results = {
            key: {name: value.to(device) for name, value in values.items()} for key, values in state["results"].items()
        }
        self._of_callbacks = state["callbacks"]


def _devices(trainer: L.Trainer) -> list[torch.device]:
    """Those on which this process draws random numbers: one, but for strategies whose one process drives all."""
    devices: list[torch.device] = getattr(trainer.strategy, "devices_of_process", [trainer.strategy.root_device])
    return devices


def _plain(state: tuple[Any, ...]) -> State:
    """A random state as ``torch.load(weights_only=True)`` can read it."""
    cpu, on_devices, python, numpy = state
    kind, keys, *rest = numpy
    return {
        "cpu": cpu,
        "device": on_devices,
        "python": (python[0], torch.tensor(python[1], dtype=torch.int64), python[2]),
        "numpy": (str(kind), torch.from_numpy(keys.astype(np.int64)), [float(value) for value in rest]),
    }


def _unplain(plain: State) -> tuple[Any, ...]:
    version, words, gauss = plain["python"]
    kind, keys, (position, has_gauss, cached) = plain["numpy"]
    return (
        plain["cpu"],
        plain["device"] or [],
        (version, tuple(words.tolist()), gauss),
        (kind, keys.numpy().astype(np.uint32), int(position), int(has_gauss), cached),
    )


def _metrics(module: L.LightningModule) -> dict[str, State]:
    for part in module.modules():
        if isinstance(part, MetricCollection) and part._groups_checked:
            part._compute_groups_create_state_ref()  # members of a group are brought up to date when they are read
    return {
        name: {"updates": part._update_count, "values": {key: _copied(getattr(part, key)) for key in part._defaults}}
        for name, part in module.named_modules()
        if isinstance(part, Metric) and part._update_count
    }


def _restore_metric(metric: Metric, state: State, device: torch.device) -> None:
    for key, value in state["values"].items():
        moved = [item.to(device) for item in value] if isinstance(value, list) else value.to(device)
        setattr(metric, key, moved)
    metric._update_count = state["updates"]
    metric._computed = None


def _copied(value: Tensor | list[Tensor]) -> Tensor | list[Tensor]:
    return [item.detach().cpu().clone() for item in value] if isinstance(value, list) else value.detach().cpu().clone()


def _add(result: Any, value: Tensor, cumulated_batch_size: Tensor | None = None) -> None:
    """Put what was logged before a run was interrupted into a mean, sum, minimum or maximum over the epoch."""
    if result.meta.is_max_reduction or result.meta.is_min_reduction:
        result.value = result.meta.reduce_fx(result.value, value)
    else:
        result.value = result.value + value
    if cumulated_batch_size is not None:
        result.cumulated_batch_size = result.cumulated_batch_size + cumulated_batch_size
