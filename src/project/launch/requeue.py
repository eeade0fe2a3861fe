"""A job that is started again, by SLURM or torchrun, goes on with its own run."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from project.launch.run_folder import is_refused

# What SLURM is asked to send before the end (--signal); SIGTERM may be scancel's, after which nothing should start.
WARNINGS = tuple(getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name))


def job_id() -> str | None:
    """The job that this process is part of: SLURM's, or else torchrun's."""
    if "SLURM_ARRAY_JOB_ID" in os.environ and "SLURM_ARRAY_TASK_ID" in os.environ:
        return f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    of_torchrun = os.environ.get("TORCHELASTIC_RUN_ID")
    return os.environ.get("SLURM_JOB_ID") or (f"torchrun-{of_torchrun}" if of_torchrun else None)


def requeue(signum: int) -> str | None:
    """Put this job back into the queue, if a warning of its end stopped it; what came of it, in a sentence."""
    job = job_id()
    if job is None or "SLURM_JOB_ID" not in os.environ or signum not in WARNINGS:
        return None
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=60, check=False)
        why = done.stderr.strip() if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        why = str(error)
    return f"SLURM's job {job} could not be requeued ({why})" if why else f"SLURM's job {job} is in the queue again"


@contextmanager
def noted(outputs: Path, command: Sequence[str], folder: Path) -> Iterator[None]:
    """Note which run folder this command has in this job, unless a mistake ends the run before its first step."""
    in_slurm = "SLURM_JOB_ID" in os.environ
    if job_id() is None or (not in_slurm and os.environ.get("TORCHELASTIC_MAX_RESTARTS") == "0"):
        yield
        return
    note = _note(outputs, command)
    note.parent.mkdir(parents=True, exist_ok=True)
    note.write_text(f"{folder.resolve()}\n{time.time()}")
    try:
        yield
    except BaseException as error:
        if is_refused(folder, error):
            note.unlink(missing_ok=True)
            with suppress(OSError):  # other jobs have notes there
                note.parent.rmdir()
        raise


def remembered(outputs: Path, command: Sequence[str]) -> Path | None:
    """The run folder that this command had before its job started again; None in a job that runs for the first time."""
    starts = [os.environ.get(f"{launcher}_RESTART_COUNT", "0") for launcher in ("SLURM", "TORCHELASTIC")]
    if job_id() is None or starts == ["0", "0"]:
        return None
    try:
        told, noted_at = _note(outputs, command).read_text().split("\n")
    except (OSError, ValueError):
        return None
    if "SLURM_JOB_ID" not in os.environ and float(noted_at) < _torchrun_started_at():
        return None
    folder = Path(told)
    return folder if (folder / "config.yaml").is_file() else None


def _torchrun_started_at() -> float:
    """Seconds since 1970; older notes are another job's: without --rdzv-id, all have the id ``none``.

    torchrun is the nearest process without its own variables: a rank's parent may be a script around it.
    """
    process = psutil.Process()
    with suppress(psutil.Error):  # of another user
        while "TORCHELASTIC_RUN_ID" in process.environ() and (parent := process.parent()):
            process = parent
    return process.create_time()


def _note(outputs: Path, command: Sequence[str]) -> Path:
    digest = hashlib.sha256("\0".join(command).encode()).hexdigest()[:12]
    return outputs / ".jobs" / f"{job_id()}_{digest}"
