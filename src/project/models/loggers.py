"""Where figures and texts go that a model makes."""

from collections.abc import Iterable
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger


def takers(loggers: Iterable[Any], method: str) -> list[Any]:
    """What has `add_figure` or `add_text`: a logger, or the writer of Lightning's logger for TensorBoard."""
    owners = [logger.experiment if isinstance(logger, TensorBoardLogger) else logger for logger in loggers]
    return [owner for owner in owners if hasattr(owner, method)]
