"""A job whose time is up saves, goes back into SLURM's queue, and goes on with its own run."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from faults.kill_and_resume import OPTIONS, last

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def told(*command: str, folder: Path | None = None) -> str:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=60).stdout


def command_lines() -> list[list[str]]:
    return [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]


def wait(condition: Callable[[], bool], job: str, log: Path, timeout_s: float = 90) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            state = told("scontrol", "show", "job", job)
            pytest.fail(f"{state}\n{log.read_text() if log.exists() else ''}", pytrace=False)
        time.sleep(0.2)


@pytest.mark.parametrize("ranks_of", ["command", "srun"])
def test_warned_job_is_requeued_and_goes_on_by_itself(slurm: Path, tmp_path: Path, ranks_of: str) -> None:
    options = (
        *OPTIONS, "trainer.devices=2", "++model.sleep_s=0.02", "trainer.max_epochs=25", "callbacks=default",
        "callbacks.last.every_n_epochs=1000", "callbacks.last.every_n_steps=20",
    )  # fmt: skip
    command = f"{sys.executable} -m project.train {' '.join(options)}"
    # --signal=B:USR1@60 would send the signal a minute before the end; scancel sends it now.
    line = f"exec {command}" if ranks_of == "command" else f"srun --ntasks 2 --overcommit {command}"
    (tmp_path / "job.sh").write_text(f"#!/bin/bash\n{line}\n")
    log = tmp_path / "log.txt"
    environment = f"PYTHONPATH={Path(__file__).parents[1]},OMP_NUM_THREADS=1,PATH={os.environ['PATH']}"
    submitted = told(
        "sbatch", "--parsable", "--requeue", "--open-mode=append", f"--output={log}", "--ntasks=2",
        f"--export={environment}", "job.sh", folder=tmp_path,
    )  # fmt: skip
    job = submitted.strip()
    try:
        wait(lambda: bool(list(tmp_path.glob("outputs/*/*/checkpoints/last.ckpt"))), job, log)
        (folder,) = tmp_path.glob("outputs/noisy_model/*")
        told("scancel", *(["--batch"] if ranks_of == "command" else []), "--signal=USR1", job)
        wait(lambda: f"SLURM's job {job} is in the queue again" in log.read_text(), job, log)
        saved = last(folder)["global_step"]
        assert 20 <= saved < 150
        wait(lambda: "JobState=PENDING" in told("scontrol", "show", "job", job), job, log)
        # SLURM waits two minutes before it starts the job again, so that the former start's end, which its step
        # daemon may still be reporting, can't pass for the new one's. Who shortens that waits for the daemon, and for
        # what it reported last to arrive.
        wait(lambda: not any(f"[{job}." in " ".join(line) for line in command_lines()), job, log)
        time.sleep(5)
        told("scontrol", "update", f"JobId={job}", "StartTime=now")
        wait((folder / "metrics.json").exists, job, log)
        assert f"Going on after step {saved} (last.ckpt)" in (folder / "ranks" / "rank_0.log").read_text()
        assert list(tmp_path.glob("outputs/noisy_model/*")) == [folder]
        assert json.loads((folder / "metrics.json").read_text())["steps"] == 150
    finally:
        subprocess.run(["scancel", job], check=False)
