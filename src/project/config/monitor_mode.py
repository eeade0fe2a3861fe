"""Is more of a metric better, or less? By its name, where that says so."""

from __future__ import annotations

import re
from typing import Any

from project.errors import UserError

LESS_IS_BETTER = ("loss", "error", "mse", "mae", "rmse", "nll", "perplexity", "bits", "fid", "wer", "cer")
MORE_IS_BETTER = ("acc", "accuracy", "auc", "auroc", "f1", "map", "precision", "recall", "iou", "dice", "bleu", "r2")


def direction(metric: str) -> str | None:
    """``min`` or ``max`` where the usual name of a metric says which is better; else None."""
    words = set(re.split(r"[^a-z0-9]+", metric.lower()))
    if words & set(LESS_IS_BETTER):
        return "min"
    return "max" if words & set(MORE_IS_BETTER) else None


def check_mode(config: dict[str, Any], overrides: list[str]) -> None:
    """Check that a typed ``monitor`` is not decided by the ``mode`` that was meant for another metric.

    Raises:
        UserError: its name says the contrary, and ``mode`` was not typed.
    """
    keys = {text.lstrip("+").partition("=")[0] for text in overrides}
    monitor, mode = config.get("monitor"), config.get("mode")
    better = direction(monitor) if isinstance(monitor, str) else None
    if "monitor" in keys and "mode" not in keys and better not in (None, mode):
        raise UserError(
            f"monitor={monitor} with mode={mode} would keep the {'highest' if mode == 'max' else 'lowest'} {monitor}: "
            f"type mode={better} too, or mode={mode} if that is meant"
        )
