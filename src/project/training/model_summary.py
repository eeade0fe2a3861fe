"""What a model consists of, when its training begins."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import Callback, ModelSummary
from rich.console import Console
from rich.table import Table

SHOWN = ("Name", "Type", "Params", "Params per Device", "In sizes", "Out sizes")


def summary_of(config: dict[str, Any], callbacks: list[Callback]) -> list[Callback]:
    """The summary that a config asks for; an empty one in the jobs of a sweep, none where the callbacks bring one."""
    is_wanted = config["trainer"].get("enable_model_summary", True)
    if not is_wanted or any(isinstance(callback, ModelSummary) for callback in callbacks):
        return []
    # With none at all Lightning would add its own.
    return [Summary(max_depth=0 if (config.get("sweep") or {}).get("job") else 1)]


class Summary(ModelSummary):
    """A row for each part, and one of all.

    Lightning's own shows operations too, which it only counts for models with an ``example_input_array``: 0 for others.
    """

    @staticmethod
    def summarize(
        summary_data: list[tuple[str, list[str]]],
        total_parameters: int,
        trainable_parameters: int,
        model_size: float,
        *_: Any,
        **__: Any,
    ) -> None:
        columns = {name: cells for name, cells in summary_data if name in SHOWN}
        table = Table()
        for name in columns:
            table.add_column(name, justify="left" if name in ("Name", "Type") else "right")
        for row in zip(*columns.values(), strict=True):
            table.add_row(*row)
        console = Console()
        console.print(table)
        trained = "all trained" if trainable_parameters == total_parameters else f"{trainable_parameters:,} trained"
        console.print(f"{total_parameters:,} parameters, {trained}, {model_size:.1f} MB", highlight=False)
