"""Several jobs in one process, and ranks that torchrun or SLURM started."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
FAST = ("trainer.max_epochs=1", "trainer.enable_progress_bar=false", "trainer.enable_model_summary=false")


def metrics(folder: Path) -> dict[str, float]:
    found: dict[str, float] = json.loads((folder / "metrics.json").read_text())["metrics"]
    return found


def test_jobs_of_a_sweep_have_folders_ranks_and_results_of_their_own(run_cli: Any, tmp_path: Path) -> None:
    result = run_cli("train", "-m", *FAST, "optimizer.lr=0.01,0.001", "trainer.devices=2")
    assert result.returncode == 0, result.stderr
    (sweep,) = tmp_path.glob("outputs/digits_mlp/*")
    jobs = sorted(path for path in sweep.iterdir() if path.is_dir())
    assert [path.name.partition("_")[0] for path in jobs] == ["0", "1"]
    assert all((job / "ranks" / "rank_1.log").exists() for job in jobs)
    assert metrics(jobs[0])["val/loss"] != metrics(jobs[1])["val/loss"]


def test_number_of_ranks_can_change_from_job_to_job(run_cli: Any, tmp_path: Path) -> None:
    result = run_cli("train", "-m", *FAST, "trainer.devices=2,1,2")
    assert result.returncode == 0, result.stderr
    two, one, again = (metrics(path.parent) for path in sorted(tmp_path.glob("outputs/*/*/*/metrics.json")))
    assert two == again
    for name in ("val/loss", "test/loss", "test/accuracy"):
        assert one[name] == pytest.approx(two[name], abs=1e-5)


def test_job_that_fails_is_reported_and_the_others_run(run_cli: Any, tmp_path: Path) -> None:
    result = run_cli("train", "-m", *FAST, "data.batch_size=63,64", "trainer.devices=2")
    assert result.returncode == 1
    assert "data.batch_size=63 is the global batch size" in result.stderr
    assert len(list(tmp_path.glob("outputs/*/*/*/metrics.json"))) == 1


@pytest.mark.parametrize("options", [[], ["--standalone"]])
def test_ranks_of_torchrun_share_one_run_folder(tmp_path: Path, options: list[str]) -> None:
    command = [*TORCHRUN, "--log-dir", str(tmp_path / "torchrun"), *options]
    if not options:
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    result = start([*command, "-m", "project.train", *FAST, "trainer.devices=2"], tmp_path)
    assert result.returncode == 0, result.stderr
    check_two_ranks(tmp_path)


def test_torchrun_with_another_number_of_ranks_is_told(tmp_path: Path) -> None:
    command = [*TORCHRUN, "--log-dir", str(tmp_path / "torchrun"), "--standalone"]
    result = start([*command, "-m", "project.train", *FAST, "trainer.devices=4"], tmp_path)
    assert result.returncode == 1
    assert result.stderr.count("error: torchrun started 2 ranks") == 1
    assert "type trainer.devices=2" in result.stderr


def test_tasks_of_srun_share_one_run_folder(slurm: Path, tmp_path: Path) -> None:
    command = ["srun", "--ntasks", "2", "--overcommit", sys.executable, "-m", "project.train"]
    result = start([*command, *FAST, "trainer.devices=2"], tmp_path)
    assert result.returncode == 0, result.stderr
    check_two_ranks(tmp_path)


def test_batch_script_of_one_task_starts_its_own_ranks(slurm: Path, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/bash\n{sys.executable} -m project.train {' '.join(FAST)} trainer.devices=2\n")
    result = start(["sbatch", "--wait", "--ntasks", "1", "--cpus-per-task", "2", str(script)], tmp_path)
    assert result.returncode == 0, result.stderr + "".join(p.read_text() for p in tmp_path.glob("slurm-*.out"))
    check_two_ranks(tmp_path)


def start(command: list[str], folder: Path) -> "subprocess.CompletedProcess[str]":
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=folder, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=240, check=False
    )


def check_two_ranks(outputs: Path) -> None:
    (folder,) = outputs.glob("outputs/digits_mlp/*")
    assert {path.name for path in (folder / "ranks").iterdir()} == {"rank_0.log", "rank_1.log"}
    assert metrics(folder)["test/accuracy"] > 0.5
