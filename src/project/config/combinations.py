"""What a strategy, a precision or a device can't be combined with; told before any rank starts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from project.config.preflight import check_installed, targets
from project.errors import UserError
from project.strategies import is_single_process

Config = dict[str, Any]
DEEPSPEED = "lightning.pytorch.strategies.DeepSpeedStrategy"
EMA = "project.strategies.weight_averaging.WeightAveraging"
PRUNING = "project.compression.pruning.Pruning"
QUANTIZATION = "project.compression.quantization.Quantization"

# Classes of strategies whose processes do not each hold the whole model, by their names; of others Lightning's or ours
# it is looked at when the model is there.
NOT_WHOLE = (
    "ShardedStrategy", "PipelineStrategy", "DataParallelStrategy", "LayerSplitStrategy",
    "FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy",
)  # fmt: skip


def check(config: Config) -> None:
    """Check that the parts of a complete config, each of which is fine, can work together.

    Strategies look themselves at what takes a model to know.

    Raises:
        UserError: they can't; the sentence names one that can.
    """
    for sentence in chain(_impossible(config), _not_compressible(config)):
        raise UserError(sentence)


def _impossible(config: Config) -> Iterator[str]:
    trainer = config["trainer"]
    strategy = trainer["strategy"]
    trains = "test" in config  # evaluation inherits the trainer of a run, of which it uses little
    if isinstance(strategy, dict) and strategy.get("_target_") == DEEPSPEED:
        check_installed("trainer.strategy", DEEPSPEED, package="deepspeed")
        if _is_on_cpu(trainer["accelerator"]):
            yield (
                "trainer.strategy=deepspeed runs on CUDA devices only, and "
                f"trainer.accelerator={trainer['accelerator']} finds none here: type trainer/strategy=fsdp, which "
                "spreads the same and runs on the CPU too"
            )
        if any(target == EMA for _, target in targets(config.get("callbacks"))):
            yield (
                "callbacks=ema averages the weights of the model, and trainer.strategy=deepspeed trains and saves "
                "copies of its own: type trainer/strategy=fsdp, or callbacks=default"
            )
    precision = str(trainer.get("precision", "32-true"))
    if precision in ("16", "16-mixed", "16-true") and _is_on_cpu(trainer["accelerator"]):
        yield (
            f"trainer.precision={precision} computes in float16, which needs a GPU, and this run is on the CPU: type "
            f"trainer.precision={'bf16-true' if precision == '16-true' else 'bf16-mixed'}"
        )
    if precision.startswith("transformer-engine") and _is_on_cpu(trainer["accelerator"]):
        yield (
            f"trainer.precision={precision} computes in float8, which needs a GPU, and this run is on the CPU: type "
            "trainer.precision=bf16-mixed"
        )
    carries_errors = isinstance(strategy, dict) and strategy.get("hook") == "powersgd"
    nan = (config.get("callbacks") or {}).get("nan") or {}
    lets_overflow = {
        f"trainer.precision={precision}": (precision in ("16", "16-mixed"), "trainer.precision=bf16-mixed"),
        "callbacks.nan.on_nan=skip": (nan.get("on_nan") == "skip", "callbacks.nan.on_nan=stop"),
    }
    for asked, (is_asked, instead) in lets_overflow.items():
        if trains and carries_errors and is_asked:
            yield (
                f"{asked} leaves out steps whose gradients are not finite, and PowerSGD carries what it did not send "
                f"over to all later ones, which would be left out too: type {instead}, or trainer/strategy=ddp"
            )
    if trains and trainer.get("sync_batchnorm") and trainer["devices"] != 1 and _is_on_cpu(trainer["accelerator"]):
        yield (
            "trainer.sync_batchnorm=true needs GPUs, since torch synchronises batch norm nowhere else, and this run is "
            "on the CPU: type trainer.sync_batchnorm=false"
        )
    optimizer = str((config.get("optimizer") or {}).get("_target_"))
    if trains and optimizer.endswith(".LBFGS") and trainer["devices"] != 1 and not is_single_process(strategy):
        yield (
            f"optimizer._target_={optimizer} decides by the loss how often to compute it, which differs between ranks: "
            "type trainer.devices=1, trainer/strategy=dp, or optimizer=adamw"
        )
    batches_per_step = trainer.get("accumulate_grad_batches", 1)
    if trains and isinstance(strategy, dict) and strategy.get("static_graph") and batches_per_step > 1:
        yield (
            f"trainer.accumulate_grad_batches={batches_per_step} leaves the exchange of gradients out of some steps, "
            "and trainer/strategy=ddp_static_graph takes all steps for alike: type trainer/strategy=ddp"
        )
    splits_layers = isinstance(strategy, dict) and strategy.get("tensor_parallel_size", 1) != 1
    if trains and splits_layers and trainer["devices"] != 1 and trainer.get("detect_anomaly"):
        yield (
            "trainer.detect_anomaly=true looks for NaN in every gradient, which torch can't do in layers that are "
            "split over ranks: type trainer/strategy=fsdp or trainer.devices=1"
        )


def _not_compressible(config: Config) -> Iterator[str]:
    """What pruning and quantization, which change the weights themselves, can't be combined with."""
    found = {target for _, target in targets(config.get("callbacks"))}
    trainer, strategy = config["trainer"], config["trainer"]["strategy"]
    name = str(strategy.get("_target_") if isinstance(strategy, dict) else strategy).rpartition(".")[2]
    is_whole = name not in NOT_WHOLE and not name.startswith("fsdp")  # as Lightning's names for its own do
    asked = {
        "callbacks=pruning": PRUNING in found,
        "callbacks=quantize": QUANTIZATION in found,
        f"quantize={config.get('quantize')}": config.get("quantize"),
    }
    for what in (what for what, is_asked in asked.items() if is_asked and not is_whole):
        yield (
            f"{what} needs the whole model in each process, and {name} (trainer.strategy) spreads or copies it: type "
            "trainer/strategy=ddp"
        )
    if PRUNING in found and trainer.get("max_epochs") == -1 and trainer.get("max_steps", -1) == -1:
        yield (
            "callbacks=pruning prunes at shares of the training, and trainer.max_epochs=-1 leaves its end open: type "
            "trainer.max_epochs=N or trainer.max_steps=N"
        )
    if {PRUNING, EMA} <= found:
        yield (
            "callbacks=pruning and an average of the weights can't be combined, since what is zero in some steps is "
            "not in their average: leave one of them out"
        )


def _is_on_cpu(accelerator: str) -> bool:
    """Whether a run is on the CPU; only for configs that depend on it, since importing torch takes a second."""
    if accelerator in ("auto", "gpu"):
        import torch

        return not (torch.cuda.is_available() or torch.backends.mps.is_available())
    return accelerator == "cpu"
