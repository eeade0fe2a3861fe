"""What a sweep's report says on the console."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from project.sweep.report import best_table
from project.sweep.results import rows_of
from sweep.folders import make_sweep, write_run


@pytest.mark.parametrize(
    ("losses", "title"),
    [
        ((0.1, 0.3, 0.1, 0.2), "The best of 4 finished runs; the first 2 are equally good"),
        ((0.1, 0.3, 0.3, 0.2), "The best of 4 finished runs"),
        ((0.1, None, 0.1, None), "The best of 2 finished runs, of 4 in all; all are equally good"),
        ((0.1, None, None, None), "The one finished run, of 4 in all"),
    ],
)
def test_runs_that_share_the_best_value_are_told(tmp_path: Path, losses: tuple[float | None, ...], title: str) -> None:
    sweep = make_sweep(tmp_path, *({"lr": str(number)} for number in range(4)))
    for job, loss in zip(sweep.jobs, losses, strict=True):
        if loss is not None:
            write_run(job.folder, metrics={"val/loss": loss}, objective=loss)
    console = Console(width=200, file=io.StringIO())
    console.print(best_table(sweep, rows_of(sweep)))
    assert console.file.getvalue().splitlines()[0].rstrip() == title
