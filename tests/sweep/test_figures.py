"""Figures of a sweep."""

from pathlib import Path

import numpy as np
import pytest

from project.sweep.figures import Column, draw_all, importance
from project.sweep.results import rows_of
from sweep.folders import make_sweep, write_run


def test_parameter_that_decides_is_the_important_one() -> None:
    rng = np.random.default_rng(0)
    decides, noise = rng.uniform(size=40), rng.uniform(size=40)
    shares = importance(
        {"decides": Column(list(map(str, decides))), "noise": Column(list(map(str, noise)))}, decides**2
    )
    assert shares["decides"] > 0.9
    assert sum(shares.values()) == pytest.approx(1)


def test_choices_keep_their_names_and_magnitudes_a_logarithmic_scale() -> None:
    assert Column(["sgd", "adamw", "sgd"]).choices == ["adamw", "sgd"]
    assert Column(["0.001", "0.1"]).is_log
    assert Column(["0.001", "0.01", "0.1"]).places == pytest.approx([0, 0.5, 1])
    assert not Column(["-1", "100"]).is_log


def test_every_varied_parameter_has_a_figure_and_the_sweep_two(tmp_path: Path) -> None:
    jobs = [{"optimizer.lr": lr, "optimizer": name, "seed": "1"} for lr in ("0.1", "0.01") for name in ("adamw", "sgd")]
    sweep = make_sweep(tmp_path, *jobs)
    for job in sweep.jobs:
        write_run(job.folder, metrics={"val/loss": 0.1}, objective=float(job.number))
    draw_all(sweep, rows_of(sweep))
    drawn = {path.name: path.read_bytes()[:4] for path in (tmp_path / "figures").iterdir()}
    assert drawn.keys() == {"lr.png", "optimizer.png", "parallel_coordinates.png", "importance.png"}
    assert set(drawn.values()) == {b"\x89PNG"}


def test_one_run_has_nothing_to_compare(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, {"seed": "1"})
    write_run(sweep.jobs[0].folder, metrics={"val/loss": 0.1}, objective=0.1)
    draw_all(sweep, rows_of(sweep))
    assert not (tmp_path / "figures").exists()
