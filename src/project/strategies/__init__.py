"""The strategies that Lightning lacks."""

from typing import Any

# By Lightning's name: the class, which is not imported here, since that takes seconds.
SINGLE_PROCESS = {"dp": f"{__name__}.data_parallel.DataParallelStrategy"}


def is_single_process(strategy: Any) -> bool:
    """Whether one process drives all devices, so that no ranks are to be started.

    Args:
        strategy: `trainer.strategy` of a composed config: a name, or a dict with a `_target_`.
    """
    if isinstance(strategy, str):
        return strategy.lower() in SINGLE_PROCESS  # as Lightning reads it
    return isinstance(strategy, dict) and strategy.get("_target_") in SINGLE_PROCESS.values()
