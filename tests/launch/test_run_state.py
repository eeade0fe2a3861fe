"""What is known of a run from its folder alone."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from project.errors import UserError
from project.launch import run_state
from project.launch.agent import RankError
from project.launch.stopping import Stopped


def test_run_is_running_and_then_finished(tmp_path: Path) -> None:
    assert run_state.read(tmp_path) is None
    with run_state.recorded(tmp_path):
        state = run_state.read(tmp_path)
        assert state is not None
        assert state.state == "running"
        assert state.duration_s is not None
    state = run_state.read(tmp_path)
    assert state is not None
    assert state.state == "finished"
    assert state.duration_s == pytest.approx(0, abs=5)


@pytest.mark.parametrize(
    ("error", "state", "reason"),
    [
        (UserError("data.batch_size=3 can't be"), "failed", "data.batch_size=3 can't be"),
        (RuntimeError("out of memory\n"), "failed", "RuntimeError: out of memory"),
        (RankError("rank 1 failed first:\nTraceback ...\nValueError: x\n"), "failed", "ValueError: x"),
        (KeyError(), "failed", "KeyError"),
        (KeyboardInterrupt(), "interrupted", "stopped by SIGINT"),
        (Stopped(signal.SIGTERM), "interrupted", "stopped by SIGTERM"),
        (SystemExit(143), "interrupted", "SystemExit: 143"),
    ],
)
def test_reason_of_an_end_is_kept_in_a_line(tmp_path: Path, error: BaseException, state: str, reason: str) -> None:
    with pytest.raises(type(error)), run_state.recorded(tmp_path):
        raise error
    found = run_state.read(tmp_path)
    assert found is not None
    assert (found.state, found.error) == (state, reason)


def test_first_failure_of_the_ranks_is_the_reason(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="a consequence"), run_state.recorded(tmp_path):
        with pytest.raises(ValueError), run_state.recorded(tmp_path, begins=False):
            raise ValueError("the cause")
        raise RuntimeError("a consequence")
    found = run_state.read(tmp_path)
    assert found is not None
    assert found.error == "ValueError: the cause"


def test_rank_of_a_run_that_left_no_folder_makes_none(tmp_path: Path) -> None:
    with pytest.raises(UserError), run_state.recorded(tmp_path / "removed", begins=False):
        raise UserError("type a=2")
    assert not (tmp_path / "removed").exists()


def test_a_folder_that_is_taken_away_is_what_the_run_failed_with(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with pytest.raises(UserError, match=r"run is gone: .* type resume=FOLDER"), run_state.recorded(folder):
        folder.rename(tmp_path / "elsewhere")
        raise FileNotFoundError("an event file")
    assert not folder.exists()


def test_first_step_is_noted_where_a_run_is_under_way(tmp_path: Path) -> None:
    run_state.record_first_step(tmp_path)
    assert run_state.read(tmp_path) is None
    with run_state.recorded(tmp_path):
        run_state.record_first_step(tmp_path)
    state = run_state.read(tmp_path)
    assert state is not None
    assert (state.state, state.trained) == ("finished", True)


def test_failure_before_there_was_a_folder_is_recorded(tmp_path: Path) -> None:
    run_state.record_failure(tmp_path / "job", UserError("no such thing"))
    found = run_state.read(tmp_path / "job")
    assert found is not None
    assert (found.state, found.error) == ("failed", "no such thing")


def test_run_whose_process_is_gone_was_killed(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=run_forever, args=(tmp_path,))
    process.start()
    end = time.monotonic() + 20
    while run_state.read(tmp_path) is None:
        assert time.monotonic() < end
        time.sleep(0.02)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    found = run_state.read(tmp_path)
    assert found is not None
    assert found.state == "killed"
    assert found.duration_s is None


def run_forever(folder: Path) -> None:
    with run_state.recorded(folder):
        time.sleep(60)
