"""How far a sweep is."""

import time
from pathlib import Path
from typing import Any

import pytest

from project.sweep.pace import seconds_left
from project.sweep.progress import Progress
from project.sweep.results import rows_of
from sweep.folders import make_sweep, write_run


def test_a_job_that_ends_has_a_line_and_the_sweep_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = make_sweep(tmp_path, *({"lr": str(number)} for number in range(6)))
    folders = [job.folder for job in sweep.jobs]
    with Progress(sweep, interval_s=60):
        write_run(folders[0], metrics={"val/loss": 0.5}, objective=0.25)
        write_run(folders[1], state="failed", error="a reason")
        write_run(folders[2], state="running", pid=1)
        write_run(folders[3], objective=0.5, pruned=True, times=(200, 0))
    *jobs, line = capsys.readouterr().out.splitlines()
    assert jobs == [
        f"job 0 (lr=0): val/loss 0.2500, 10 s, in {folders[0]}",
        f"job 1 (lr=1): failed: a reason, in {folders[1]}",
        f"job 3 (lr=3): pruned, 3 min, in {folders[3]}",
    ]
    assert line.startswith("sweep: 1 of 6 done, 1 running, 1 pruned, 1 failed; best val/loss 0.2500 (lr=0); at most ")


def test_a_job_that_is_compared_by_nothing_shows_its_first_metrics(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = make_sweep(tmp_path, {}, objectives={})
    with Progress(sweep, interval_s=60):
        write_run(sweep.jobs[0].folder, metrics={"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0})
    assert capsys.readouterr().out.splitlines() == [
        f"job 0: a 1.0000, b 2, c 3, 10 s, in {sweep.jobs[0].folder}",
        "sweep: 1 of 1 done",
    ]


def left(tmp_path: Path, total: int, at_once: int, *times: tuple[float, float], **last: Any) -> tuple[float, bool]:
    """Seconds left of a sweep whose jobs began and ended so many seconds ago; and whether that is a bound."""
    sweep = make_sweep(tmp_path, *({"lr": str(number)} for number in range(len(times))))
    for job, of_job in zip(sweep.jobs, times, strict=True):
        is_last = job is sweep.jobs[-1]
        write_run(job.folder, metrics={}, objective=1.0, times=of_job, **(last if is_last else {}))
    rows = rows_of(sweep)
    ended = [row for row in rows if row.state != "running"]
    found = seconds_left(ended, [row for row in rows if row.state == "running"], total - len(rows), at_once)
    assert found is not None
    return found.seconds, found.is_bound


def test_time_left_is_counted_without_the_start_up_of_the_first_job(tmp_path: Path) -> None:
    # 30 s of imports and 10 s of work; 9 s of work, and 1 s between two jobs.
    assert left(tmp_path, 5, 1, (60, 20), (19, 10), (9, 0)) == (pytest.approx(20, abs=0.5), False)


def test_time_left_is_a_bound_while_only_a_first_job_has_ended(tmp_path: Path) -> None:
    assert left(tmp_path, 3, 1, (40, 0)) == (pytest.approx(80, abs=0.5), True)


def test_jobs_at_once_share_the_time_that_is_left(tmp_path: Path) -> None:
    first_two = ((60, 20), (60, 21))
    assert left(tmp_path, 7, 2, *first_two, (19, 9)) == (pytest.approx(22, abs=0.5), False)
    # The last of them takes as long as one does, however many could run.
    assert left(tmp_path / "last", 4, 8, *first_two, (19, 9)) == (pytest.approx(11, abs=0.5), False)


def test_what_a_running_job_has_behind_it_is_not_left(tmp_path: Path) -> None:
    times = ((60, 20), (20, 10), (7, 0))
    seconds, is_bound = left(tmp_path, 4, 1, *times, state="running", pid=1)
    assert (seconds, is_bound) == (pytest.approx(13, abs=0.5), False)


def test_failures_tell_nothing_of_the_time_that_jobs_take(tmp_path: Path) -> None:
    times = ((60, 20), (20, 10), (10, 10))
    assert left(tmp_path, 4, 1, *times, state="failed") == (pytest.approx(10, abs=0.5), False)


def test_jobs_of_an_earlier_start_do_not_count_for_the_time_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = make_sweep(tmp_path, {"lr": "1"}, {"lr": "2"})
    write_run(sweep.jobs[0].folder, metrics={"val/loss": 0.5}, objective=0.5)
    with Progress(sweep, interval_s=60) as progress:
        assert "left" not in progress.line()
    assert capsys.readouterr().out == ""  # nothing has ended since


def test_line_comes_while_the_launcher_waits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = make_sweep(tmp_path, {"lr": "1"})
    with Progress(sweep, interval_s=0.05):
        write_run(sweep.jobs[0].folder, metrics={"val/loss": 0.5}, objective=0.5)
        end = time.monotonic() + 20
        while "1 of 1 done" not in capsys.readouterr().out:
            assert time.monotonic() < end
            time.sleep(0.05)
