"""A rank's random numbers, its process group, its end."""

import contextlib
import random
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only

from project.launch import rank
from project.launch.stopping import Stopped
from project.training.seeding import seed_rank


@pytest.fixture
def numbers_restored() -> Iterator[None]:
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    yield
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


def drawn(seed: int, rank: int) -> tuple[float, float, float]:
    seed_rank(seed, rank)
    return torch.rand(1).item(), float(np.random.rand()), random.random()


@pytest.mark.usefixtures("numbers_restored")
def test_a_rank_draws_the_same_numbers_again() -> None:
    assert drawn(7, 3) == drawn(7, 3)


@pytest.mark.usefixtures("numbers_restored")
def test_ranks_and_neighbouring_seeds_draw_different_numbers_from_each_source() -> None:
    draws = [drawn(seed, rank) for seed in range(4) for rank in range(8)]
    for source in zip(*draws, strict=True):
        assert len(set(source)) == len(draws)


@pytest.mark.usefixtures("numbers_restored")
def test_the_largest_seed_works_on_any_rank() -> None:
    assert drawn(2**32 - 1, 1023) != drawn(2**32 - 1, 1022)


def test_a_command_is_found_by_module_and_name() -> None:
    assert rank.load("project.launch.rank:faults_explained") is rank.faults_explained


@pytest.mark.parametrize(
    ("environment", "kind"),
    [
        ({}, "LightningEnvironment"),
        ({"SLURM_NTASKS": "2", "SLURM_JOB_ID": "1"}, "LightningEnvironment"),  # an idle SLURM shell
        ({"TORCHELASTIC_RUN_ID": "x", "RANK": "0"}, "TorchElasticEnvironment"),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}, "SLURMEnvironment"),
    ],
)
def test_lightning_is_told_who_started_the_ranks(
    environment: dict[str, str], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "RANK", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with rank.environment_restored():  # SLURM_NTASKS_PER_NODE would be read by the next srun
        found = rank.cluster_environment()
    assert type(found).__name__ == kind
    # Lightning's own handler would put the job into the queue again and train on.
    assert getattr(found, "auto_requeue", False) is False


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What becomes of the process group of two ranks, of which this is the first."""
    done: list[str] = []
    environment = SimpleNamespace(
        world_size=lambda: 2, global_rank=lambda: 0, local_rank=lambda: 0, main_address="localhost", main_port=1
    )
    for name in ("MASTER_ADDR", "MASTER_PORT", "TORCH_FR_BUFFER_SIZE"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    monkeypatch.setattr(rank, "cluster_environment", lambda: environment)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: done.append("joined"))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: done.append("left"))
    monkeypatch.setattr(rank.atexit, "register", lambda function, _: done.append("ends at once"))
    return done


def trained(accelerator: str, error: BaseException | None, done: list[str]) -> list[str]:
    config = {"trainer": {"accelerator": accelerator, "devices": 2}, "launch": {"timeout_s": 1}}
    with contextlib.suppress(RuntimeError, Stopped), rank.process_group(config):
        done.append("trained")
        if error is not None:
            raise error
    return done


STOPPED_BY_ALL = Stopped(15, by_all=True)


@pytest.mark.parametrize("error", [None, RuntimeError("boom"), STOPPED_BY_ALL, Stopped(15)])
def test_the_process_group_is_left_whatever_happens(done: list[str], error: BaseException | None) -> None:
    """A group that is alive at the end of its process can abort it."""
    assert trained("cpu", error, done) == ["joined", "trained", "left"]


@pytest.mark.parametrize(
    ("error", "end"),
    [(None, "left"), (STOPPED_BY_ALL, "left"), (RuntimeError("boom"), "ends at once"), (Stopped(15), "ends at once")],
)
def test_a_rank_that_fails_alone_does_not_wait_for_the_others_to_leave_nccls_group(
    done: list[str], error: BaseException | None, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"is_available": True, "device_count": 2, "current_device": 0, "set_device": None}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    assert trained("cuda", error, done) == ["joined", "trained", end]


@pytest.mark.parametrize(("error", "code"), [("Stopped(15)", 143), ("KeyboardInterrupt()", 130), ("OSError()", 1)])
def test_a_process_that_ends_at_once_runs_nothing_more_and_keeps_its_exit_code(error: str, code: int) -> None:
    lines = (
        "import atexit, sys; from project.launch import rank; from project.launch.stopping import Stopped",
        "atexit.register(print, 'too late')",
        f"atexit.register(rank._end_at_once, {error})",
        "print('told'); sys.exit(3)",
    )
    ended = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (code, "told\n")
