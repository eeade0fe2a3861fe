"""What the jobs of a sweep came to, read from their folders."""

import csv
import io
from pathlib import Path

import psutil
import pytest

from project.sweep import record
from project.sweep.results import as_csv, best_row, over_seeds, ranked, rows_of, table_of
from sweep.folders import make_sweep, write_run


def dead_pid() -> int:
    """The number of no process."""
    return next(pid for pid in range(2**22, 2, -1) if not psutil.pid_exists(pid))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sweep with a job in every state there is."""
    sweep = make_sweep(tmp_path, *({"lr": str(number)} for number in range(8)))
    finished, better, pruned, failed, running, killed, _, diverged = (job.folder for job in sweep.jobs)
    write_run(finished, metrics={"val/loss": 0.7, "test/loss": 1.0}, objective=0.5)
    write_run(better, metrics={"val/loss": 0.2}, objective=0.1)
    write_run(pruned, metrics={"val/loss": 0.01}, objective=0.01, pruned=True)
    write_run(failed, state="failed", error="data.batch_size=63 can't be")
    write_run(running, state="running", pid=1)
    write_run(killed, state="running", pid=dead_pid())
    write_run(diverged, metrics={"val/loss": None})
    return tmp_path


def test_every_job_has_its_state(folder: Path) -> None:
    states = [row.state for row in rows_of(record.read(folder))]
    assert states == ["finished", "finished", "pruned", "failed", "running", "killed", "waiting", "finished"]


def test_reason_of_a_failure_is_kept(folder: Path) -> None:
    assert rows_of(record.read(folder))[3].error == "data.batch_size=63 can't be"


def test_trial_without_a_value_has_failed(folder: Path) -> None:
    sweep = record.read(folder)
    sweep.kind = "optuna"
    assert (rows_of(sweep)[7].state, rows_of(sweep)[7].error) == ("failed", "it has no finite val/loss")


def test_best_is_the_best_value_of_the_finished_ones(folder: Path) -> None:
    sweep = record.read(folder)
    assert [row.number for row in ranked(rows_of(sweep), sweep.objectives)] == [1, 0]
    assert [row.number for row in ranked(rows_of(sweep), {"val/loss": "max"})] == [0, 1]


def test_csv_has_a_row_a_job_with_parameters_metrics_state_and_folder(folder: Path) -> None:
    sweep = record.read(folder)
    rows = list(csv.DictReader(io.StringIO(as_csv(*table_of(rows_of(sweep), sweep.objectives)))))
    assert len(rows) == 8
    first = rows[0]
    assert first["lr"] == "0"
    assert float(first["best val/loss"]) == 0.5
    assert float(first["val/loss"]) == 0.7
    assert float(first["duration_s"]) == pytest.approx(10, abs=0.1)
    assert (folder / first["folder"] / "metrics.json").exists()
    assert rows[6]["duration_s"] == rows[6]["test/loss"] == ""


def test_several_objectives_put_what_nothing_surpasses_first(tmp_path: Path) -> None:
    objectives = {"val/loss": "min", "samples_per_s": "max"}
    sweep = make_sweep(tmp_path, *({"lr": str(number)} for number in range(3)), objectives=objectives)
    for job, (loss, speed) in zip(sweep.jobs, [(0.3, 10.0), (0.2, 9.0), (0.1, 20.0)], strict=True):
        write_run(job.folder, metrics={"val/loss": loss}, objective=loss, samples_per_s=speed)
    assert [row.number for row in ranked(rows_of(sweep), objectives)] == [2, 1, 0]
    header, _ = table_of(rows_of(sweep), objectives)
    assert header.count("val/loss") == header.count("samples_per_s") == 1


def test_best_over_seeds_is_the_best_mean_and_not_the_luckiest_run(tmp_path: Path) -> None:
    parameters = [{"lr": lr, "seed": seed} for lr in ("0.1", "0.2") for seed in ("1", "2")]
    sweep = make_sweep(tmp_path, *parameters)
    for job, loss in zip(sweep.jobs, [0.0, 1.0, 0.3, 0.5], strict=True):
        write_run(job.folder, metrics={"val/loss": loss}, objective=loss)
    rows = rows_of(sweep)
    groups = over_seeds(rows, sweep.objectives)
    assert [(group.name, group.mean) for group in groups] == [("lr=0.2", 0.4), ("lr=0.1", 0.5)]
    assert groups[0].spread == pytest.approx(0.02**0.5)
    best = best_row(rows, sweep.objectives)
    assert best is not None
    assert best.number == 2


def test_parameters_are_called_by_their_keys_also_where_they_were_added(tmp_path: Path) -> None:
    parameters = [{"+model.lr": lr, "++seed": seed} for lr in ("0.1", "0.2") for seed in ("1", "2")]
    sweep = make_sweep(tmp_path, *parameters)
    for job in sweep.jobs:
        write_run(job.folder, metrics={"val/loss": 1.0}, objective=1.0)
    rows = rows_of(sweep)
    header, body = table_of(rows, sweep.objectives)
    assert header[3:5] == ["model.lr", "seed"]
    assert body[1][3:5] == ["0.1", "2"]
    assert [group.name for group in over_seeds(rows, sweep.objectives)] == ["lr=0.1", "lr=0.2"]
    # Typed again, the plus is needed.
    assert sweep.jobs[1].overrides([])[:2] == ["+model.lr=0.1", "++seed=2"]


def test_only_of_what_is_monitored_the_best_value_counts(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, {"lr": "1"}, by_monitor=False)
    write_run(sweep.jobs[0].folder, metrics={"val/loss": 0.7}, objective=0.5)
    (row,) = rows_of(record.read(tmp_path))
    assert row.objectives == (0.7,)
    header, _ = table_of([row], sweep.objectives, by_monitor=False)
    assert header.count("val/loss") == 1
    assert "best val/loss" not in header


def test_one_seed_is_no_spread(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, {"lr": "0.1", "seed": "1"}, {"lr": "0.2", "seed": "1"})
    for job in sweep.jobs:
        write_run(job.folder, metrics={"val/loss": 1.0}, objective=1.0)
    assert over_seeds(rows_of(sweep), sweep.objectives) == []
