"""Jobs that run at once take different GPUs, on a machine that only says it has some."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from project.sweep import gpu_slots

# A job: it holds its GPUs until it is told to end.
JOB = """
import json, os, sys
from omegaconf import OmegaConf
from project.sweep import gpu_slots
gpu_slots.count = lambda: 2
gpu_slots.LOOK_EVERY_S = 0.05
gpu_slots.agent.warm_up = lambda: None
with gpu_slots.own_gpus(OmegaConf.create({"trainer": {"accelerator": "auto", "devices": int(sys.argv[1])}})):
    print("has", os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
    sys.stdin.readline()
"""
Process = "subprocess.Popen[str]"


def begin(folder: Path, devices: int = 1) -> Process:
    env = os.environ | {"TMPDIR": str(folder)}
    env.pop("CUDA_VISIBLE_DEVICES", None)
    command = [sys.executable, "-c", JOB, str(devices)]
    return subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def line_of(job: Process) -> str:
    assert job.stdout
    return job.stdout.readline().strip()


@pytest.mark.timeout(60)
def test_jobs_at_once_take_different_gpus_and_wait_for_one_that_is_free(tmp_path: Path) -> None:
    first, second = begin(tmp_path), begin(tmp_path)
    assert {line_of(first), line_of(second)} == {"has 0", "has 1"}
    third, both = begin(tmp_path), begin(tmp_path, 2)
    assert line_of(third) == "A job waits for 1 of the 2 GPUs, which other jobs have taken."
    assert line_of(both) == "A job waits for 2 of the 2 GPUs, which other jobs have taken."
    first.send_signal(signal.SIGKILL)  # the system frees what it held
    assert line_of(third) in ("has 0", "has 1")
    for job in (second, third):
        job.communicate("\n")
    assert line_of(both) == "has 0,1"
    both.communicate("\n")
    first.communicate()


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_slots, "count", lambda: 2)
    monkeypatch.setattr(gpu_slots.agent, "warm_up", lambda: None)
    monkeypatch.setattr(gpu_slots.tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv(gpu_slots.VISIBLE, raising=False)


def seen(accelerator: str, devices: object) -> str | None:
    """What a job sees that runs meanwhile."""
    with gpu_slots.own_gpus(OmegaConf.create({"trainer": {"accelerator": accelerator, "devices": devices}})):
        return os.environ.get(gpu_slots.VISIBLE)


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("accelerator", "devices", "expected"),
    [
        ("auto", 1, "0"),
        ("gpu", "2", "0,1"),
        ("cuda", "auto", "0,1"),
        ("auto", -1, "0,1"),
        ("auto", 3, None),  # refused later
        ("auto", [1], None),
        ("cpu", 1, None),
    ],
)
def test_a_job_sees_as_many_gpus_as_it_asks_for(accelerator: str, devices: object, expected: str | None) -> None:
    assert seen(accelerator, devices) == expected
    assert gpu_slots.VISIBLE not in os.environ


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("visible", ["3,5", "GPU-8a1c, GPU-77f0", "MIG-GPU-8a1c/1/0,MIG-GPU-8a1c/2/0"])
def test_gpus_that_the_environment_names_are_shared_out(monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    monkeypatch.setenv(gpu_slots.VISIBLE, visible)
    first, second = (name.strip() for name in visible.split(","))
    with gpu_slots.own_gpus(OmegaConf.create({"trainer": {"accelerator": "auto", "devices": 1}})):
        assert os.environ[gpu_slots.VISIBLE] == first
        monkeypatch.setenv(gpu_slots.VISIBLE, visible)
        assert seen("auto", 1) == second
    assert os.environ[gpu_slots.VISIBLE] == visible


def test_nothing_changes_without_gpus_or_a_trainer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_slots.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(gpu_slots, "count", lambda: 0)
    before = dict(os.environ)
    with gpu_slots.own_gpus(OmegaConf.create({"trainer": {"accelerator": "auto", "devices": 1}})):
        assert dict(os.environ) == before
    monkeypatch.setattr(gpu_slots, "count", lambda: 2)
    with gpu_slots.own_gpus(OmegaConf.create({})):
        assert dict(os.environ) == before
    assert list(tmp_path.iterdir()) == []


# Read at the start of each process: joblib's, and what they start.
TWO_GPUS = "from project.sweep import gpu_slots; gpu_slots.count = lambda: 2"


@pytest.mark.slow
def test_jobs_of_joblib_have_gpus_of_their_own(run_cli: Any, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(TWO_GPUS)
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "TMPDIR": str(tmp_path)}
    small = ("trainer.max_epochs=1", "trainer.limit_train_batches=2", "callbacks=none", "logger=none")
    options = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "seed=1,2,3", "trainer.devices=1")
    result = run_cli("train", "-m", *small, *options, env=env)
    assert result.returncode == 0, result.stderr
    found = [json.loads(path.read_text()) for path in tmp_path.glob("outputs/*/*/*/environment.json")]
    assert len(found) == 3
    assert {environment["cuda_visible_devices"] for environment in found} <= {"0", "1"}
