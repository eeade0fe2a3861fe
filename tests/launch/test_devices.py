"""What the user may type as devices, how many ranks that makes, and who started them."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from project.config.composition import config_folder, register_resolvers
from project.errors import UserError
from project.launch import devices


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        *("TORCHELASTIC_RUN_ID", "RANK", "LOCAL_WORLD_SIZE"),
        *("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_TASKS_PER_NODE"),
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """A host with as many CUDA devices as the parameter says, and no MPS."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: request.param)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


def with_cuda(number: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("cuda", [number], indirect=True, ids=[f"{number}_cuda"])


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (4, 4),
        ("4", 4),
        (" 4 ", 4),
        ("auto", "auto"),
        (-1, -1),
        ("-1", -1),
        ("0,2", [0, 2]),
        ("1,", [1]),
        ([0, 2], [0, 2]),
        ((3,), [3]),
    ],
)
def test_devices_are_a_number_or_indices_or_auto(typed: Any, meant: Any) -> None:
    assert devices.parse(typed) == meant


@pytest.mark.parametrize(
    "typed",
    [0, "0", -2, "-2", 1.0, True, None, "", "two", "cuda:0", "1.5", "0,,1", "0,x", [], [-1], [0, 0], ["0"], [0.0]],
)
def test_anything_else_is_refused_with_what_is_allowed(typed: Any) -> None:
    with pytest.raises(UserError, match=r"^trainer\.devices=.*: type a number from 1, auto, -1 for all, or indices"):
        devices.parse(typed)


@pytest.mark.parametrize(
    ("typed", "ranks"), [(1, 1), (4, 4), ("4", 4), ("auto", 1), (-1, 1), ("0,2", 2), ([0, 1, 5], 3)]
)
def test_on_cpu_there_are_as_many_ranks_as_asked_for(typed: Any, ranks: int) -> None:
    assert devices.count("cpu", typed) == ranks


@with_cuda(0)
@pytest.mark.parametrize(("typed", "ranks"), [(1, 1), (3, 3), ("auto", 1)])
@pytest.mark.usefixtures("cuda")
def test_auto_falls_back_to_cpu_where_no_other_device_is(typed: Any, ranks: int) -> None:
    assert devices.count("auto", typed) == ranks


@with_cuda(0)
@pytest.mark.usefixtures("cuda")
def test_devices_that_only_gpus_have_are_refused_where_there_are_none() -> None:
    with pytest.raises(UserError, match=r"^trainer\.devices=\[0,1\] names GPUs.*: type trainer\.devices=2 for"):
        devices.count("auto", [0, 1])
    with pytest.raises(UserError, match=r"^trainer\.devices=-1 asks for all GPUs.*: type trainer\.devices=auto$"):
        devices.count("auto", -1)


@with_cuda(2)
@pytest.mark.parametrize("accelerator", ["auto", "gpu", "cuda"])
@pytest.mark.parametrize(("typed", "ranks"), [(1, 1), (2, 2), ("auto", 2), (-1, 2), ([1], 1), ("0,1", 2)])
@pytest.mark.usefixtures("cuda")
def test_on_cuda_auto_means_all_devices_there_are(accelerator: str, typed: Any, ranks: int) -> None:
    assert devices.count(accelerator, typed) == ranks


@pytest.mark.parametrize(
    ("cuda", "accelerator", "typed", "gpus"),
    [(4, "auto", 1, 1), (4, "auto", 2, 2), (4, "cuda", "auto", 4), (4, "cpu", 2, 0), (0, "auto", 2, 0)],
    indirect=["cuda"],
)
@pytest.mark.usefixtures("cuda")
def test_a_job_of_a_sweep_asks_for_as_many_gpus_as_it_has_ranks_on_them(
    monkeypatch: pytest.MonkeyPatch, accelerator: str, typed: Any, gpus: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: torch.cuda.device_count() > 0)
    register_resolvers()
    launcher: Any = OmegaConf.load(config_folder() / "hydra" / "launcher" / "ray.yaml")
    config = OmegaConf.create({"trainer": {"accelerator": accelerator, "devices": typed}, "launcher": launcher.ray})
    assert config.launcher.remote.num_gpus == gpus


@with_cuda(2)
@pytest.mark.parametrize(
    ("accelerator", "typed", "text"),
    [
        ("cuda", 3, r"trainer\.devices=3: this host has 2 CUDA device\(s\): type trainer\.devices=2 or less"),
        ("auto", "4", r"trainer\.devices=4: .* or trainer\.accelerator=cpu trainer\.devices=4"),
        ("gpu", [0, 2], r"trainer\.devices=\[0, 2\]: this host has the CUDA devices 0 to 1"),
    ],
)
@pytest.mark.usefixtures("cuda")
def test_more_cuda_devices_than_there_are_are_refused(accelerator: str, typed: Any, text: str) -> None:
    with pytest.raises(UserError, match=text):
        devices.count(accelerator, typed)


@with_cuda(0)
@pytest.mark.parametrize("accelerator", ["cuda", "gpu", "mps"])
@pytest.mark.usefixtures("cuda")
def test_an_accelerator_that_the_host_lacks_is_refused_with_the_way_to_cpu(accelerator: str) -> None:
    with pytest.raises(UserError, match=rf"^trainer\.accelerator={accelerator}: .*: type trainer\.accelerator=cpu"):
        devices.count(accelerator, 1)


def test_mps_is_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert devices.count("mps", "auto") == 1
    with pytest.raises(UserError, match="this host has one MPS device: type trainer.devices=1"):
        devices.count("gpu", 2)


@pytest.mark.parametrize(
    ("environment", "launcher"),
    [
        ({}, None),
        ({"TORCHELASTIC_RUN_ID": "x", "RANK": "1"}, "torchrun"),
        ({"TORCHELASTIC_RUN_ID": "x"}, None),
        ({"RANK": "0", "WORLD_SIZE": "2"}, None),
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"}, "slurm"),
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),
        # A batch script that calls python once: the job has many tasks, this step has one.
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, None),
        # torchrun on each host of a SLURM job: the ranks are torchrun's.
        (
            {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"},
            "torchrun",
        ),
    ],
)
def test_the_launcher_is_known_by_its_variables(
    environment: dict[str, str], launcher: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert devices.started_by() == launcher


@pytest.mark.parametrize(
    ("environment", "ranks"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "12"}, 12),
        ({"SLURM_STEP_TASKS_PER_NODE": "16(x2),3"}, 16),
        ({"SLURM_STEP_TASKS_PER_NODE": "3"}, 3),
        ({"LOCAL_WORLD_SIZE": "2", "SLURM_STEP_TASKS_PER_NODE": "1"}, 2),
    ],
)
def test_ranks_of_this_host_are_what_the_launcher_says(
    environment: dict[str, str], ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert devices.local_world_size() == ranks


@pytest.mark.parametrize(
    ("typed", "local_rank", "device"), [(4, 3, 3), ("auto", 1, 1), (-1, 0, 0), ([2, 0], 0, 2), ("2,0", 1, 0)]
)
def test_a_rank_takes_the_cuda_device_at_its_place(typed: Any, local_rank: int, device: int) -> None:
    assert devices.local_cuda_device(typed, local_rank, there=4) == device


@pytest.mark.parametrize(("typed", "local_rank"), [(2, 1), ([0, 3], 1)])
def test_a_rank_that_does_not_see_its_cuda_device_is_told_why(typed: Any, local_rank: int) -> None:
    """As under srun --gpus-per-task=1, which shows each rank one device."""
    with pytest.raises(UserError, match=r"takes the CUDA device \d, and sees 1: .*let each see all of them"):
        devices.local_cuda_device(typed, local_rank, there=1)


def test_more_processes_than_a_host_can_start_are_refused() -> None:
    with pytest.raises(
        UserError, match=r"trainer\.devices=1000000000: each CPU rank is a process.*type trainer\.devices="
    ):
        devices.count("cpu", 10**9)


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "SLURM_STEP_NUM_TASKS"])
@pytest.mark.parametrize(("value", "is_wrong"), [("z", True), ("", True), ("1", False)])
def test_what_the_environment_says_of_ranks_must_be_numbers(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, is_wrong: bool
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"^{name}={value} in .*: type unset {name}$") if is_wrong else nullcontext():
        devices.check_environment()
