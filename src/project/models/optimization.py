"""From plain config to the optimizer and the learning rate schedule of a run."""

import inspect
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import lightning as L
import torch
from hydra.utils import instantiate
from lightning.pytorch.utilities.types import LRSchedulerConfigType, OptimizerLRScheduler
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

ONE_CYCLE = "torch.optim.lr_scheduler.OneCycleLR"
LIGHTNING_KEYS = ("frequency", "monitor", "strict", "name")


def configure(
    module: L.LightningModule, optimizer: Mapping[str, Any], scheduler: Mapping[str, Any] | None = None
) -> OptimizerLRScheduler:
    """What `configure_optimizers` returns.

    Args:
        module: Attached to a trainer if the schedule needs the length of the run.
        optimizer: `_target_` and arguments; `params` are the module's trainable parameters. `fused` is true where it
            can be and nothing is said of it.
        scheduler: `_target_`, arguments, and how Lightning steps it: `interval` (epoch or step), `frequency`,
            `monitor`, `strict`, `name`. An argument "auto" becomes the length of the run in `interval`s:
            its epochs, or its optimizer steps.

    Raises:
        ValueError: `interval` is neither epoch nor step, "auto" is asked of a run without an end, or a class refuses
            its arguments or the module's parameters.
    """
    # Partial, because Hydra would copy parameters that it is given as arguments.
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    build = instantiate(optimizer, _partial_=True, _convert_="all")
    fused = {"fused": True} if can_fuse(module, parameters, build.func, optimizer) else {}
    with _refusal_told("optimizer", optimizer):
        built: Optimizer = build(params=parameters, **fused)
    _keep_kernel(built)
    if not _has_scaler(module):
        # As fused it would unscale gradients itself, and so Lightning refuses to clip them, also where none are scaled.
        built._step_supports_amp_scaling = False  # type: ignore[attr-defined]
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
    if arguments["_target_"] == ONE_CYCLE and not {"momentum", "betas"} & built.defaults.keys():
        arguments.setdefault("cycle_momentum", False)  # there is none to cycle
    with _refusal_told("scheduler", scheduler):
        schedule = instantiate(arguments, _partial_=True, _convert_="all")(optimizer=built)
    lr_scheduler = {"scheduler": schedule, "interval": interval, **stepping}
    return {"optimizer": built, "lr_scheduler": cast("LRSchedulerConfigType", lr_scheduler)}


@contextmanager
def _refusal_told(group: str, node: Mapping[str, Any]) -> Iterator[None]:
    """Tell what a class refuses with its name, since a traceback through torch shows neither it nor what to type."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{group}._target_={node['_target_']} can't be built ({' '.join(str(error).split())}): type "
            f"{group}={'adamw' if group == 'optimizer' else 'none'}, or other values of {group}"
        ) from error


def can_fuse(
    module: L.LightningModule, parameters: Iterable[nn.Parameter], cls: Any, arguments: Mapping[str, Any]
) -> bool:
    """Whether torch can update all parameters in one kernel, instead of in ten operations for each, and is free to.

    By default it does not. AdamW's part of a step of the digits' MLP took 0.20 ms without, 0.04 ms so.
    """
    if {"fused", "foreach", "differentiable"} & arguments.keys() or "fused" not in inspect.signature(cls).parameters:
        return False
    if any(getattr(part, "sparse", False) for part in module.modules()):
        return False  # gradients of such embeddings are sparse
    if _has_scaler(module):
        return False  # gradients would be unscaled within the kernel, after they are clipped and their norm is drawn
    # The kernels know no DTensors, those of SGD at least.
    return all(
        p.is_floating_point() and p.device.type in ("cpu", "cuda") and not isinstance(p, DTensor) for p in parameters
    )


def _has_scaler(module: L.LightningModule) -> bool:
    trainer = module._trainer
    return trainer is not None and getattr(trainer.precision_plugin, "scaler", None) is not None


def _keep_kernel(optimizer: Optimizer) -> None:
    """Let a checkpoint not decide whether the optimizer is fused: it may be of another device or strategy."""

    def restore(optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            if "fused" in group:
                group["fused"] = optimizer.defaults["fused"]
                for parameter in group["params"]:
                    _place_step(optimizer.state.get(parameter, {}), parameter, group)

    optimizer.register_load_state_dict_post_hook(restore)


def _place_step(state: dict[str, Any], parameter: Tensor, group: Mapping[str, Any]) -> None:
    """Put a parameter's count of steps where its kernel looks for it; torch has put it where the checkpoint's did.

    CUDA's fused kernel reads it on the device, and would take an address of the host for one of its own. The others
    read it on the host, and would wait for the device for each parameter in each step.
    """
    step = state.get("step")
    if isinstance(step, Tensor):
        is_read_there = group["fused"] or group.get("capturable")
        state["step"] = step.to(parameter.device, torch.float32) if is_read_there else step.cpu()


def _length_of_run(trainer: L.Trainer, interval: str, name: str) -> int:
    length = trainer.max_epochs if interval == "epoch" else trainer.estimated_stepping_batches
    limit = trainer.limit_train_batches
    if 0 in (length, limit):
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
