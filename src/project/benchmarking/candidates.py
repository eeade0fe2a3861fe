"""Which overrides could help against what bounds a run, and which of them change its results. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

MOST_WORKERS_PER_CORE = 8  # workers that wait for a disk need no core each


@dataclass(frozen=True)
class Machine:
    """What candidates depend on besides the config.

    Attributes:
        cores_per_rank: CPU cores of each rank.
        on_gpu: Whether the ranks compute on GPUs.
        several: Whether there are several ranks.
    """

    cores_per_rank: int
    on_gpu: bool
    several: bool


def candidates(bound: str, advised: list[str], config: dict[str, Any], machine: Machine) -> list[str]:
    """What to try against a bound: first what the diagnosis advised, then the rest that is known to help.

    Args:
        bound: As the tracker's diagnosis names it.
        advised: Its remedies, in its order.
        config: The experiment as it is now, composed.
        machine: Where it runs.
    """
    more: dict[str, list[str]] = {
        "input": list(_for_input(config, machine)),
        "transfer": list(_for_transfer(config, machine)),
        "synchronisation": list(_for_synchronisation(config, machine)),
        "straggler": list(_for_input(config, machine)),
        "host": [*_fused(config), *_compiled(config), *_threads(config, machine), *_larger_batch(config)],
        "compute": [
            *_compiled(config),
            *_fused(config),
            *_channels_last(config),
            *_threads(config, machine),
            *_for_gpu(config, machine),
            *_larger_batch(config),
        ],
    }
    return list(dict.fromkeys([*advised, *more.get(bound, [])]))


def _for_input(config: dict[str, Any], machine: Machine) -> Iterator[str]:
    data = config["data"]
    if "num_workers" not in data:
        return
    now = data["num_workers"]
    # A quarter more is no new try; each step doubles what the machine's cores suggest.
    for factor in (1, 2, 4, MOST_WORKERS_PER_CORE):
        workers = factor * machine.cores_per_rank
        if workers > 1.25 * now:
            yield f"data.num_workers={workers}"
    if now and "prefetch_factor" in data:
        yield f"data.prefetch_factor={2 * (data['prefetch_factor'] or 2)}"


def _for_transfer(config: dict[str, Any], machine: Machine) -> Iterator[str]:
    for key in ("pin_memory", "prefetch_to_device"):
        if machine.on_gpu and config["data"].get(key) is False:
            yield f"data.{key}=true"


def _for_synchronisation(config: dict[str, Any], machine: Machine) -> Iterator[str]:
    if not machine.several:
        return
    strategy = config["trainer"]["strategy"]
    target = str(strategy.get("_target_", "")) if isinstance(strategy, dict) else str(strategy)
    if isinstance(strategy, str) or target.endswith("DDPStrategy"):
        yield "trainer/strategy=ddp_static_graph"
        if isinstance(strategy, dict) and "bucket_cap_mb" not in strategy:
            yield "+trainer.strategy.bucket_cap_mb=100"  # of 25: fewer messages
        yield f"trainer/strategy={'ddp_bf16_compress' if machine.on_gpu else 'ddp_powersgd'}"
        yield "trainer/strategy=ddp_local_sgd"
    yield f"trainer.accumulate_grad_batches={4 * config['trainer']['accumulate_grad_batches']}"
    yield from _larger_batch(config)


def _for_gpu(config: dict[str, Any], machine: Machine) -> Iterator[str]:
    if machine.on_gpu and config["trainer"]["precision"] == "32-true":
        yield "trainer.precision=bf16-mixed"


def _compiled(config: dict[str, Any]) -> Iterator[str]:
    if config["model"].get("compile") is False:
        yield "model.compile=true"


def _fused(config: dict[str, Any]) -> Iterator[str]:
    optimizer = config.get("optimizer") or {}
    fuses_itself = str(config["model"].get("_target_")).startswith("project.models.") and "fused" not in optimizer
    is_torchs = str(optimizer.get("_target_", "")).startswith("torch.optim.")
    if is_torchs and not fuses_itself and not optimizer.get("fused"):
        yield "optimizer.fused=true" if "fused" in optimizer else "+optimizer.fused=true"


def _channels_last(config: dict[str, Any]) -> Iterator[str]:
    if config["model"].get("channels_last") is False:
        yield "model.channels_last=true"


def _threads(config: dict[str, Any], machine: Machine) -> Iterator[str]:
    # Small operations wait longer for a second thread than they would take alone.
    if not machine.on_gpu and machine.cores_per_rank > 1 and config["launch"]["threads_per_rank"] != 1:
        yield "launch.threads_per_rank=1"


def _larger_batch(config: dict[str, Any]) -> Iterator[str]:
    if "batch_size" in config["data"]:
        yield f"data.batch_size={2 * config['data']['batch_size']}"
