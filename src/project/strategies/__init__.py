"""The strategies that Lightning lacks."""

from typing import Any

from project.errors import UserError
from project.strategies.pipeline_layout import PipelineLayout, layout_of

# By Lightning's name: the class, which is not imported here, since that takes seconds.
SINGLE_PROCESS = {
    "dp": f"{__name__}.data_parallel.DataParallelStrategy",
    "layer_split": f"{__name__}.layer_split.LayerSplitStrategy",
}
PIPELINE = f"{__name__}.pipeline.PipelineStrategy"


def is_single_process(strategy: Any) -> bool:
    """Whether one process drives all devices, so that no ranks are to be started.

    Args:
        strategy: `trainer.strategy` of a composed config: a name, or a dict with a `_target_`.
    """
    if isinstance(strategy, str):
        return strategy.lower() in SINGLE_PROCESS  # as Lightning reads it
    return isinstance(strategy, dict) and strategy.get("_target_") in SINGLE_PROCESS.values()


def pipeline_layout(strategy: Any, local_world_size: int) -> PipelineLayout | None:
    """How pipelines lie on the ranks of a host; None for any other strategy.

    Raises:
        UserError: they can't.
    """
    is_pipeline = isinstance(strategy, dict) and strategy.get("_target_") == PIPELINE
    return layout_of(strategy, local_world_size) if is_pipeline else None


def ranks_per_batch(strategy: Any, local_world_size: int) -> int:
    """Ranks that hold one model together, and so read the same share of the batch.

    Raises:
        UserError: they do not divide the ranks of a host.
    """
    layout = pipeline_layout(strategy, local_world_size)
    return layout.ranks if layout is not None else tensor_parallel_size(strategy, local_world_size)


def tensor_parallel_size(strategy: Any, local_world_size: int) -> int:
    """Ranks that split one model's layers, and so read the same share of the batch; 1 without tensor parallel.

    Raises:
        UserError: it does not divide the ranks of a host.
    """
    given = strategy.get("tensor_parallel_size", 1) if isinstance(strategy, dict) else 1
    size = local_world_size if given == "auto" else given
    if not isinstance(size, int) or size < 1 or local_world_size % size:
        devices = 2 * size if isinstance(size, int) and size > 0 else 2
        raise UserError(
            f"trainer.strategy.tensor_parallel_size={given} does not divide the {local_world_size} rank(s) of this "
            f"host: type trainer.devices={devices}, or a size that does"
        )
    return size
