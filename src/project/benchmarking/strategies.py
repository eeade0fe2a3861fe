"""How fast each strategy trains, against a hand-written loop with torch's own wrapper.

The sides of a row are as in ``overhead``. With the defaults, two ranks on two shared cores, 2 December 2026, medians
with the smallest and the largest: ``ddp`` 1.81 times as fast (1.48 to 1.90), ``dp`` 1.74 (1.68 to 2.05), ``fsdp`` 1.20
(1.14 to 1.38). Before freed memory stayed with the process and optimizers were fused: 1.04, 0.94 and 0.93.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from project.benchmarking.compare import Comparison, compare
from project.benchmarking.report import Results, of_comparisons
from project.benchmarking.setup import hand_written, template, training_config, wide_enough
from project.errors import UserError
from project.launch.run import Run

AT_LEAST = 0.95


def compare_strategies(
    config: dict[str, Any],
    run: Run,
    tell: Callable[[str], None],
    strategies: list[str],
    devices: int | list[int],
    repeats: int,
    warmup_steps: int,
    steps: int,
    step_ms: float | None,
    timeout_s: float,
) -> Results:
    """Samples per second of each strategy on each number of devices.

    Args:
        config: The experiment.
        run: Its folder is for the measured runs.
        tell: Shows a line of progress.
        strategies: Of ``ddp``, ``dp`` and ``fsdp``.
        devices: One number, or several.
        repeats: Fresh processes for each side of each row.
        warmup_steps: Steps that are not measured.
        steps: Steps that are.
        step_ms: The net becomes so wide that a step takes this long; None takes the experiment's net.
        timeout_s: Of one process.
    """
    if set(strategies) - {"ddp", "dp", "fsdp"} or min([devices] if isinstance(devices, int) else devices) < 2:
        raise UserError(
            f"benchmark.strategies={strategies} on benchmark.devices={devices}: the hand-written loops are ddp, dp and "
            "fsdp on 2 devices or more: type benchmark.strategies=[ddp,dp,fsdp] benchmark.devices=2, or "
            "benchmark=scaling, which takes any"
        )
    numbers = [devices] if isinstance(devices, int) else devices
    batch_size = config["data"]["batch_size"]
    total = warmup_steps + steps
    base = training_config(config, batch_size, total)
    if step_ms is not None:
        tell(f"looking for the width at which a step takes {step_ms} ms")
        base = wide_enough(base, step_ms, numbers[0], run.folder / "calibration", timeout_s)
    groups = []
    for strategy in strategies:
        for number in numbers:
            where = f"{strategy} on {number} devices"
            arguments: dict[str, Any] = {"per_step": batch_size, "strategy": strategy, "devices": number}
            candidate = template(f"template {where}", base, total, warmup_steps, **arguments)
            reference = hand_written(f"hand-written {where}", base, total, warmup_steps, **arguments)
            groups.append([Comparison(where, "sample", candidate, reference, AT_LEAST)])
    return of_comparisons(compare(groups, repeats, run.folder / "runs", timeout_s, tell))
