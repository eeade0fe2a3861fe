"""How far a sweep is."""

import re
import time
from pathlib import Path

import pytest

from project.sweep.progress import Progress
from sweep.folders import make_sweep, write_run


def test_line_tells_done_running_failed_best_and_time_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = make_sweep(tmp_path, *({"lr": str(number)} for number in range(5)))
    folders = [job.folder for job in sweep.jobs]
    with Progress(sweep, interval_s=60):
        write_run(folders[0], metrics={"val/loss": 0.5}, objective=0.25)
        write_run(folders[1], state="failed", error="a reason")
        write_run(folders[2], state="running", pid=1)
        write_run(folders[3], objective=0.5, pruned=True)
    text = capsys.readouterr().out
    assert text.startswith("sweep: 3 of 5 done, 1 running, 1 pruned, 1 failed; best val/loss 0.2500 (lr=0); about ")
    assert re.search(r"about \d+ s left\n$", text)


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
