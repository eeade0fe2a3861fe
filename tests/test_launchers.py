"""Several jobs in one process, and ranks that torchrun or SLURM started."""

import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
FAST = ("trainer.max_epochs=1", "trainer.enable_progress_bar=false", "trainer.enable_model_summary=false")


def metrics(folder: Path) -> dict[str, float]:
    found: dict[str, float] = json.loads((folder / "metrics.json").read_text())["metrics"]
    return found


# As short as a training can be.
SMALL = (*FAST, "trainer.limit_train_batches=4", "callbacks=none", "trainer.devices=2")
LAUNCHERS = {
    "basic": (),
    "joblib": ("hydra/launcher=joblib",),
    "slurm": ("hydra/launcher=submitit_slurm",),
    "ray": (
        "hydra/launcher=ray",
        "+hydra.launcher.ray.init={num_cpus:2,num_gpus:2}",  # that there are none matters to nobody here
        "hydra.launcher.ray.remote.num_gpus=1",
        "trainer.accelerator=cpu",
    ),
}


@pytest.fixture(scope="module")
def alone(run: Any) -> Callable[[str, str], dict[str, float]]:
    """The metrics of a job of the sweep that is run by itself."""

    @cache
    def metrics_of(lr: str, seed: str) -> dict[str, float]:
        found: dict[str, float] = run(*SMALL, "logger=none", f"optimizer.lr={lr}", f"seed={seed}")[1]
        return found

    return metrics_of


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_sweep_is_the_same_under_every_launcher(
    request: pytest.FixtureRequest,
    run_cli: Any,
    alone: Callable[[str, str], dict[str, float]],
    tmp_path: Path,
    launcher: str,
) -> None:
    env = {"OMP_NUM_THREADS": "1"}
    if launcher == "slurm":
        request.getfixturevalue("slurm")
    if launcher == "ray":
        pytest.importorskip("hydra_plugins.hydra_ray_launcher")
        # Its own files: a key for its processes, and their logs.
        ray_folder = request.getfixturevalue("short_folder")
        env |= {"RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": str(ray_folder), "RAY_USAGE_STATS_ENABLED": "0"}
    values = ("optimizer.lr=0.01,0.001", "seed=1,2")
    result = run_cli("train", "-m", *SMALL, *values, *LAUNCHERS[launcher], env=env, timeout_s=280)
    assert result.returncode == 0, result.stderr
    assert "sweep: 4 of 4 done; best val/accuracy" in result.stdout

    (results,) = tmp_path.glob("outputs/**/results.csv")
    rows = list(csv.DictReader(results.open()))
    folders = sorted(path.parent for path in results.parent.glob("*/config.yaml"))
    assert [row["folder"] for row in rows] == [folder.name for folder in folders]
    for row, folder in zip(rows, folders, strict=True):
        assert row["state"] == "finished"
        assert (folder / "ranks" / "rank_1.log").exists()
        expected = alone(row["optimizer.lr"], row["seed"])
        assert {name: float(row[name]) for name in expected} == pytest.approx(expected, abs=1e-6)
        assert hparams(folder) == {"optimizer.lr": float(row["optimizer.lr"]), "seed": float(row["seed"])}
    assert len({row["val/loss"] for row in rows}) == 4
    if launcher == "basic":
        best = max(rows, key=lambda row: float(row["best val/accuracy"]))
        again = run_cli("train", f"experiment={results.parent}/best.yaml", "paths.run_dir=again", env=env)
        assert again.returncode == 0, again.stderr
        assert metrics(tmp_path / "again")["val/loss"] == pytest.approx(float(best["val/loss"]), abs=1e-6)
    if launcher == "ray":
        environments = [json.loads((folder / "environment.json").read_text()) for folder in folders]
        assert {environment["cuda_visible_devices"] for environment in environments} == {"0", "1"}
    if launcher == "slurm":
        assert subprocess.check_output(["squeue", "--noheader"], text=True) == ""


def hparams(folder: Path) -> dict[str, Any]:
    """The row of a run in TensorBoard's HParams tab."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import metadata

    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    data = metadata.parse_session_start_info_plugin_data(
        events.SummaryMetadata(metadata.SESSION_START_INFO_TAG).plugin_data.content
    )
    return {name: value.number_value for name, value in data.hparams.items()}


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A temporary folder whose path leaves room for the names of Ray's sockets, which have 107 characters."""
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder:
        yield Path(folder)


def test_job_that_slurm_ends_fails_alone(slurm: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "project.train", "-m", *SMALL, "hydra/launcher=submitit_slurm", "logger=none"]
    process = subprocess.Popen(
        [*command, "trainer.devices=1", "trainer.max_epochs=100000,1"],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        end = time.monotonic() + 120
        while not list(tmp_path.glob("outputs/*/*/0_*/state.json")):
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.2)
        (job,) = subprocess.check_output(["squeue", "--noheader", "--format=%i"], text=True).split()[:1]
        subprocess.run(["scancel", "--signal=KILL", "--full", f"{job.partition('_')[0]}_0"], check=True)
        stdout, stderr = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 1, stdout + stderr
    assert "1 of 2 jobs of the sweep failed" in stderr
    assert "0_max_epochs=100000: SLURM ended job" in stderr or "its process is gone" in stderr
    (results,) = tmp_path.glob("outputs/**/results.csv")
    assert [row["state"] for row in csv.DictReader(results.open())] in (["failed", "finished"], ["killed", "finished"])


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


# Ranks that do not start in the same second.
LATE = """
import os, time
time.sleep(1.1 * int(os.environ["RANK"]))
from project.train import main
main()
"""


@pytest.mark.parametrize("at_once", [False, True])
def test_ranks_of_torchrun_share_one_run_folder_whenever_they_start(tmp_path: Path, at_once: bool) -> None:
    script = tmp_path / "late.py"
    script.write_text(LATE)
    options = ["--standalone"] if at_once else ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    program = ["-m", "project.train"] if at_once else [str(script)]
    command = [*TORCHRUN, "--log-dir", str(tmp_path / "torchrun"), *options, *program]
    result = start([*command, *FAST, "trainer.devices=2"], tmp_path)
    # What aborts a rank stands in its log, with the stacks of its threads.
    assert result.returncode == 0, result.stderr + "".join(p.read_text() for p in tmp_path.rglob("rank_*.log"))
    check_two_ranks(tmp_path)


@pytest.mark.parametrize("late", ["0", "1"])
def test_torchrun_with_another_number_of_ranks_is_told(tmp_path: Path, late: str) -> None:
    script = tmp_path / "late.py"
    script.write_text(LATE.replace('int(os.environ["RANK"])', f'3 * (os.environ["RANK"] == "{late}")'))
    command = [*TORCHRUN, "--log-dir", str(tmp_path / "torchrun"), "--standalone"]
    result = start([*command, str(script), *FAST, "trainer.devices=4"], tmp_path)
    assert result.returncode == 1
    assert result.stderr.count("error: torchrun started 2 ranks") == 1
    assert "type trainer.devices=2" in result.stderr


def test_mistake_under_torchrun_is_told_at_each_start_and_leaves_nothing(tmp_path: Path) -> None:
    torchrun = [*TORCHRUN, "--log-dir", str(tmp_path / "torchrun"), "--standalone", "--max-restarts", "1"]
    result = start([*torchrun, "-m", "project.train", *FAST, "trainer.devices=2", "monitor=val/nothing"], tmp_path)
    assert result.returncode == 1
    assert result.stderr.count("error: monitor=val/nothing is not among what ImageClassifier logs") == 2
    assert "Gloo" not in result.stderr  # ranks of the second start do not wait for those of the first
    assert [path.name for path in tmp_path.iterdir()] == ["torchrun"]


def test_tasks_of_srun_share_one_run_folder(slurm: Path, tmp_path: Path) -> None:
    command = ["srun", "--ntasks", "2", "--overcommit", sys.executable, "-m", "project.train"]
    result = start([*command, *FAST, "trainer.devices=2"], tmp_path)
    assert result.returncode == 0, result.stderr
    check_two_ranks(tmp_path)


def test_batch_script_of_one_task_starts_its_own_ranks(slurm: Path, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/bash\n{sys.executable} -m project.train {' '.join(FAST)} trainer.devices=2\n")
    submitted = start(["sbatch", "--parsable", "--ntasks", "1", "--cpus-per-task", "2", str(script)], tmp_path)
    assert submitted.returncode == 0, submitted.stderr
    end = time.monotonic() + 120  # sbatch --wait would look after 2, 6, 14, 30 and 62 s
    while not (state := state_of(submitted.stdout.strip())).startswith(("COMPLETED", "FAILED")):
        assert time.monotonic() < end, state
        time.sleep(0.2)
    assert state == "COMPLETED", "".join(p.read_text() for p in tmp_path.glob("slurm-*.out"))
    check_two_ranks(tmp_path)


def state_of(job: str) -> str:
    told = subprocess.check_output(["scontrol", "show", "job", job], text=True)
    return next(word.removeprefix("JobState=") for word in told.split() if word.startswith("JobState="))


def start(command: list[str], folder: Path) -> "subprocess.CompletedProcess[str]":
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    return subprocess.run(
        command, cwd=folder, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=240, check=False
    )


def check_two_ranks(outputs: Path) -> None:
    (folder,) = outputs.glob("outputs/digits_mlp/*")
    assert {path.name for path in (folder / "ranks").iterdir()} == {"rank_0.log", "rank_1.log"}
    assert metrics(folder)["test/accuracy"] > 0.5
