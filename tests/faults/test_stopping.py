"""Signals that ask a run to stop: it saves, ends, and goes on as if nothing had been."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from faults.kill_and_resume import OPTIONS, differences, last

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

LONG = ("++model.sleep_s=0.02", "trainer.max_epochs=50", "callbacks.last.every_n_epochs=1000")
Start = Callable[..., Any]


def step_of(folder: Path) -> int:
    return int(last(folder)["global_step"])


@pytest.mark.parametrize(
    ("name", "code", "devices"),
    [("SIGTERM", 143, 1), ("SIGTERM", 143, 2), ("SIGUSR1", 138, 2), ("SIGUSR2", 140, 1), ("SIGINT", 130, 1)],
)
def test_signal_saves_and_ends_with_the_code_of_a_shell(start: Start, name: str, code: int, devices: int) -> None:
    command = start(*LONG, f"trainer.devices={devices}", "callbacks.last.every_n_steps=3")
    command.until_saved()
    before = step_of(command.folder)
    began = time.monotonic()
    os.kill(command.pid, getattr(signal, name))
    assert command.wait() == code
    assert time.monotonic() - began < 10
    assert f"Stopped by {name}; its state is saved. To go on: python -m project.train resume=run" in command.output()
    assert step_of(command.folder) >= before
    assert "Traceback" not in command.output()
    again = start("resume=run", "trainer.max_steps=60", "++model.sleep_s=0")
    assert again.wait(60) == 0, again.output()
    assert "Going on after step" in command.log_of(0)
    assert step_of(command.folder) == 60


@pytest.mark.parametrize("devices", [1, 2])
def test_ctrl_c_before_there_is_a_checkpoint_says_so_and_how_to_go_on(start: Start, devices: int) -> None:
    command = start(*LONG, f"trainer.devices={devices}", "callbacks.last=null", "callbacks.best=null")
    command.until((command.folder / "ranks" / "rank_0.log").exists)
    os.kill(command.pid, signal.SIGINT)
    assert command.wait() == 130
    told = "Stopped by SIGINT; it has no checkpoint yet, and would begin anew. To go on: python -m project.train "
    assert f"{told}resume=run\n" in command.output()
    assert "nothing was written" not in command.output()


def test_signal_to_one_rank_stops_all_at_the_same_step(start: Start) -> None:
    command = start(*LONG, "trainer.devices=2")
    command.until(lambda: (command.folder / "tensorboard").exists() and len(command.ranks()) == 2)
    time.sleep(1)
    command.ranks()[1].send_signal(signal.SIGTERM)
    assert command.wait() == 143
    assert "its state is saved" in command.output()
    states = last(command.folder)["ranks"]["of_ranks"]
    assert len(states) == 2


def test_second_ctrl_c_ends_at_once(start: Start) -> None:
    command = start(*LONG, "trainer.devices=2", "++model.at=5", "++model.who=1", "++model.what=wait")
    command.until(lambda: (command.folder / "tensorboard").exists() and len(command.ranks()) == 2)
    time.sleep(1)
    os.kill(command.pid, signal.SIGINT)
    time.sleep(1)
    assert command.process.is_alive()  # it waits for the end of a step that does not come
    began = time.monotonic()
    os.kill(command.pid, signal.SIGINT)
    assert command.wait() == 130
    assert time.monotonic() - began < 5


HANGS = ("++data.bad=7", "++data.how=hangs", "data.num_workers=2", "trainer.devices=1", "launch.max_restarts=0")


def waiting(command: Any) -> None:
    """Until the run waits for a worker that hangs, which is its first batch or one of the first."""
    command.until(lambda: (command.folder / "tensorboard").exists())
    time.sleep(3)


def test_one_rank_whose_worker_hangs_is_named_and_ended(start: Start) -> None:
    command = start(*LONG, *HANGS, "launch.hang_timeout_s=2")
    assert command.wait(60) == 1
    assert "rank 0 hangs: it waits for data in step" in command.output()
    state = json.loads((command.folder / "state.json").read_text())
    assert state["state"] == "failed"
    assert "rank 0 hangs" in state["error"]
    assert "most recent call first" in command.log_of(0)  # the stacks of all threads


def test_one_rank_whose_worker_hangs_ends_after_the_grace_time(start: Start) -> None:
    command = start(*LONG, *HANGS, "launch.grace_s=2")
    waiting(command)
    began = time.monotonic()
    os.kill(command.pid, signal.SIGTERM)
    assert command.wait(60) == 143
    assert time.monotonic() - began < 15
    assert "did not come to the end of a step within launch.grace_s=2 of SIGTERM" in command.output()
    assert "To go on: python -m project.train resume=run" in command.output()


def test_second_ctrl_c_ends_one_rank_whose_worker_hangs_at_once(start: Start) -> None:
    command = start(*LONG, *HANGS)
    waiting(command)
    os.kill(command.pid, signal.SIGINT)
    time.sleep(0.5)
    assert command.process.is_alive()  # it waits for the end of a step that does not come
    began = time.monotonic()
    os.kill(command.pid, signal.SIGINT)
    assert command.wait() == 130
    assert time.monotonic() - began < 5


def test_run_that_does_not_come_to_the_end_of_a_step_is_ended_after_the_grace_time(start: Start) -> None:
    command = start(
        *LONG, "trainer.devices=2", "++model.at=5", "++model.who=1", "++model.what=wait", "launch.grace_s=2"
    )  # fmt: skip
    command.until(lambda: (command.folder / "tensorboard").exists() and len(command.ranks()) == 2)
    time.sleep(1)
    os.kill(command.pid, signal.SIGTERM)
    assert command.wait() == 143
    assert "did not come to the end of a step within launch.grace_s=2 of SIGTERM" in command.output()


@pytest.mark.parametrize("moment", ["validation", "last step of an epoch"])
def test_run_stopped_around_a_validation_goes_on_exactly(start: Start, tmp_path: Path, moment: str) -> None:
    """The signal comes while the ranks validate, or in the step before; either way nothing is lost or done twice."""
    step = 12 if moment == "validation" else 11
    marks = ("++model.signal_at=12", "++model.at=-1") if moment == "validation" else (
        "++model.signal_at=-1", f"++model.at={step}", "++model.who=1", "++model.what=SIGTERM"
    )  # fmt: skip
    command = start("trainer.devices=2", "trainer.max_epochs=4", *marks)
    assert command.wait(60) == 143
    assert "its state is saved" in command.output()
    assert start("resume=run", "++model.at=-1", "++model.signal_at=-1").wait(60) == 0
    disturbed = last(command.folder)
    whole = start("trainer.devices=2", "trainer.max_epochs=4", "paths.run_dir=whole")
    assert whole.wait(60) == 0
    assert differences(last(tmp_path / "whole"), disturbed) == []


def test_signal_to_the_whole_process_group_saves(tmp_path: Path) -> None:
    """As a terminal sends it: also to the server that the ranks come from, and to the workers of their loaders."""
    command = [sys.executable, "-m", "project.train", *OPTIONS, *LONG, "trainer.devices=2", "data.num_workers=1"]
    output = tmp_path / "output.txt"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [*command, "callbacks.last.every_n_steps=3", "paths.run_dir=run"], cwd=tmp_path, stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}, stdout=file, stderr=file,
            start_new_session=True,
        )  # fmt: skip
    try:
        end = time.monotonic() + 90
        while not (tmp_path / "run" / "checkpoints" / "last.ckpt").exists():
            assert process.poll() is None, output.read_text()
            assert time.monotonic() < end, output.read_text()
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(30) == 143, output.read_text()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert "Stopped by SIGTERM; its state is saved" in output.read_text()
    assert len(last(tmp_path / "run")["ranks"]["of_ranks"]) == 2
