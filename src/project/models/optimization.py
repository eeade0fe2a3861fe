"""From plain config to the optimizer and the learning rate schedule of a run."""

import math
from collections.abc import Mapping
from typing import Any, cast

import lightning as L
from hydra.utils import instantiate
from lightning.pytorch.utilities.types import LRSchedulerConfigType, OptimizerLRScheduler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

LIGHTNING_KEYS = ("frequency", "monitor", "strict", "name")


def configure(
    module: L.LightningModule, optimizer: Mapping[str, Any], scheduler: Mapping[str, Any] | None = None
) -> OptimizerLRScheduler:
    """What `configure_optimizers` returns.

    Args:
        module: Attached to a trainer if the schedule needs the length of the run.
        optimizer: `_target_` and arguments; `params` are the module's trainable parameters.
        scheduler: `_target_`, arguments, and how Lightning steps it: `interval` (epoch or step), `frequency`,
            `monitor`, `strict`, `name`. An argument "auto" becomes the length of the run in `interval`s:
            its epochs, or its optimizer steps.

    Raises:
        ValueError: `interval` is neither epoch nor step, or "auto" is asked of a run without an end.
    """
    # Partial, because Hydra would copy parameters that it is given as arguments.
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    built: Optimizer = instantiate(optimizer, _partial_=True, _convert_="all")(params=parameters)
    if scheduler is None:
        return built
    arguments = dict(scheduler)
    interval = arguments.pop("interval", "epoch")
    if interval not in ("epoch", "step"):
        raise ValueError(f"scheduler.interval={interval} is unknown: type scheduler.interval=epoch or step")
    stepping = {key: arguments.pop(key) for key in LIGHTNING_KEYS if key in arguments}
    for name, value in arguments.items():
        if value == "auto":
            arguments[name] = _length_of_run(module.trainer, interval, name)
    schedule = instantiate(arguments, _partial_=True, _convert_="all")(optimizer=built)
    lr_scheduler = {"scheduler": schedule, "interval": interval, **stepping}
    return {"optimizer": built, "lr_scheduler": cast("LRSchedulerConfigType", lr_scheduler)}


def _length_of_run(trainer: L.Trainer, interval: str, name: str) -> int:
    length = trainer.max_epochs if interval == "epoch" else trainer.estimated_stepping_batches
    if length == 0:
        limit = trainer.limit_train_batches
        raise ValueError(f"trainer.limit_train_batches={limit} leaves no batch to train on: type 1 or more, or null")
    if length is None or not 0 <= length < math.inf:
        remedy = "trainer.max_epochs=20" + (" or scheduler.interval=step" if trainer.max_steps > 0 else "")
        raise ValueError(
            f"scheduler.{name}=auto needs the length of the run, which "
            f"trainer.max_epochs={trainer.max_epochs} leaves open: type {remedy}"
        )
    return int(length)


def warmup_cosine(optimizer: Optimizer, warmup_steps: int | float, total_steps: int) -> LambdaLR:
    """A linear rise to the optimizer's learning rate, then half a cosine down to 0 after `total_steps`.

    Args:
        optimizer: Its learning rates are the peak.
        warmup_steps: Steps of the rise; a float is a fraction of `total_steps`.
        total_steps: Steps of the whole schedule.

    Raises:
        ValueError: The warm-up is negative or takes the whole schedule.
    """
    warmup = round(warmup_steps * total_steps) if isinstance(warmup_steps, float) else warmup_steps
    if not 0 <= warmup < total_steps:
        raise ValueError(
            f"scheduler.warmup_steps={warmup_steps} must leave some of the {total_steps} steps: "
            "type scheduler.warmup_steps=0.1 for the first tenth"
        )

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)  # above 0, so that the first step is not lost
        progress = min(1.0, (step - warmup) / (total_steps - warmup))
        return 0.5 * (1 + math.cos(math.pi * progress))

    return LambdaLR(optimizer, factor)
