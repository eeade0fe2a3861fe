"""Jobs of a sweep on SLURM: each an allocation with one task a rank."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from typing import Any

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus
from hydra_plugins.hydra_submitit_launcher import submitit_launcher

from project.errors import UserError

POLL_S = 1.0
FILES_S = 10.0  # until a file that another host wrote is seen here
GENERAL = (
    "nodes",
    "tasks_per_node",
    "cpus_per_task",
    "gpus_per_node",
    "mem_gb",
    "timeout_min",
    "name",
    "stderr_to_stdout",
)


class SlurmLauncher(submitit_launcher.SlurmLauncher):  # type: ignore[misc]
    """Hydra's launcher for SLURM, for jobs that may fail.

    Its own ends the sweep at the first job that SLURM ended (out of memory, cancelled, time is up), and on a cluster
    without accounting it waits for that job for ever. Ctrl-C cancels the jobs.
    """

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Submit all jobs as one array and wait for them."""
        import submitit

        params = dict(self.params)
        tasks = params.get("tasks_per_node")
        if isinstance(tasks, bool) or not isinstance(tasks, int) or tasks < 1:
            raise UserError(
                f"hydra.launcher.tasks_per_node={tasks} can't be: type it, or trainer.devices, as a number from 1; it "
                "is the same for all jobs of a sweep"
            )
        executor = submitit.AutoExecutor(folder=params.pop("submitit_folder"), cluster="slurm")
        executor.update_parameters(
            **{key if key in GENERAL else f"slurm_{key}": value for key, value in params.items() if value is not None}
        )
        state = Singleton.get_state()
        with executor.batch():
            jobs = [
                executor.submit(self, list(overrides), "hydra.sweep.dir", initial_job_idx + place, "", state)
                for place, overrides in enumerate(job_overrides)
            ]
        print(f"{len(jobs)} jobs submitted to SLURM: {', '.join(job.job_id for job in jobs)}", flush=True)
        try:
            _wait(jobs)
        except BaseException:
            for job in jobs:
                job.cancel(check=False)
            raise
        return [_result(job) for job in jobs]


def _wait(jobs: Sequence[Any]) -> None:
    """Wait until no job is in the queue; one that SLURM puts there again is."""
    ids = ",".join({job.job_id.partition("_")[0] for job in jobs})
    while _are_queued(ids):
        time.sleep(POLL_S)


def _are_queued(ids: str) -> bool:
    queue = subprocess.run(
        ["squeue", "--noheader", "--format=%i", f"--jobs={ids}"], capture_output=True, text=True, check=False
    )
    # SLURM forgets a job some minutes after its end, and calls its id invalid; any other error is a controller that
    # does not answer at the moment.
    return bool(queue.stdout.strip()) or (queue.returncode != 0 and "Invalid job id" not in queue.stderr)


def _result(job: Any) -> JobReturn:
    """What came of an ended job: the first failure of its tasks, else what the first task returned."""
    files = [job.task(task).paths.result_pickle for task in range(job.num_tasks)]
    end = time.monotonic() + FILES_S
    while not all(file.exists() for file in files) and time.monotonic() < end:
        time.sleep(0.2)
    left = [file for file in files if not file.exists()]
    if left:
        output = str(left[0]).replace("_result.pkl", "_log.err")
        error = UserError(f"SLURM ended job {job.job_id} before it was done; its output is in {output}")
        return JobReturn(status=JobStatus.FAILED, _return_value=error)
    try:
        of_tasks: list[JobReturn] = job.results()
    except Exception as error:  # of submitit: the job's own is returned
        return JobReturn(status=JobStatus.FAILED, _return_value=error)
    return next((task for task in of_tasks if task.status == JobStatus.FAILED), of_tasks[0])
