"""A job that is started again finds its run."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from project.errors import UserError
from project.launch import requeue, run_state

COMMAND = ["train", "seed=1"]


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("SLURM_", "TORCHELASTIC_"))]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize("launcher", ["SLURM", "TORCHELASTIC"])
def test_run_is_found_by_the_same_command_of_the_same_job_that_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: str
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with requeue.noted(tmp_path, COMMAND, folder):
        assert list(tmp_path.iterdir()) == [folder]  # no job, nothing to remember
    job = "SLURM_JOB_ID" if launcher == "SLURM" else "TORCHELASTIC_RUN_ID"
    monkeypatch.setenv(job, "7")
    with requeue.noted(tmp_path, COMMAND, folder):
        (folder / "config.yaml").touch()
    assert requeue.remembered(tmp_path, COMMAND) is None  # not started again
    monkeypatch.setenv(f"{launcher}_RESTART_COUNT", "1")
    assert requeue.remembered(tmp_path, COMMAND) == folder
    assert requeue.remembered(tmp_path, ["train", "seed=2"]) is None
    monkeypatch.setenv(job, "8")
    assert requeue.remembered(tmp_path, COMMAND) is None


@pytest.mark.parametrize("launcher", ["SLURM", "TORCHELASTIC"])
def test_a_note_of_another_torchrun_with_the_same_id_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: str
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").touch()
    monkeypatch.setenv("SLURM_JOB_ID" if launcher == "SLURM" else "TORCHELASTIC_RUN_ID", "none")
    with requeue.noted(tmp_path, COMMAND, folder):
        pass
    monkeypatch.setenv(f"{launcher}_RESTART_COUNT", "1")
    assert requeue.remembered(tmp_path, COMMAND) == folder
    monkeypatch.setattr(requeue, "_torchrun_started_at", lambda: time.time() + 1)
    assert requeue.remembered(tmp_path, COMMAND) == (folder if launcher == "SLURM" else None)


def test_torchrun_is_found_above_a_script_that_it_started() -> None:
    asked = "from project.launch.requeue import _torchrun_started_at as told; print(told())"
    script = f"{sys.executable} -c '{asked}'; true"
    env = os.environ | {"TORCHELASTIC_RUN_ID": "none"}
    told = subprocess.run(["sh", "-c", script], env=env, capture_output=True, text=True, check=True).stdout
    assert float(told) == pytest.approx(psutil.Process().create_time(), abs=0.1)


def test_torchrun_without_restarts_is_not_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    with requeue.noted(tmp_path, COMMAND, tmp_path):
        assert not (tmp_path / ".jobs").exists()


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("others", [True, False])
def test_a_run_that_a_mistake_ends_before_its_first_step_is_not_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: bool, others: bool
) -> None:
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    folder, notes = tmp_path / "run", tmp_path / ".jobs"
    folder.mkdir()
    if others:
        notes.mkdir()
        (notes / "of_another").touch()
    with pytest.raises(UserError), requeue.noted(tmp_path, COMMAND, folder), run_state.recorded(folder):
        if trained:
            run_state.record_first_step(folder)
        raise UserError("type a=2")
    assert notes.exists() is (trained or others)
    assert len(list(tmp_path.glob(".jobs/*"))) == trained + others


@pytest.mark.parametrize(
    ("name", "asked"), [("SIGUSR1", True), ("SIGUSR2", True), ("SIGTERM", False), ("SIGINT", False)]
)
def test_only_a_warning_of_the_end_puts_a_job_into_the_queue_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, asked: bool
) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert requeue.requeue(getattr(signal, name)) is None  # no job
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    told = requeue.requeue(getattr(signal, name))
    assert told == ("SLURM's job 7_3 is in the queue again" if asked else None)
    assert (tmp_path / "asked").exists() is asked
    if asked:
        assert (tmp_path / "asked").read_text() == "requeue 7_3\n"


def test_failure_to_requeue_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "job 9 could not be requeued" in (requeue.requeue(signal.SIGUSR1) or "")
