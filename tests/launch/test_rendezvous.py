"""Ranks find those of their own start, and every group waits as long as the config says."""

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import spawn

from project.launch.elastic import free_port
from project.launch.rendezvous import default_timeout, own_store, waiting_told

TIMEOUT = timedelta(seconds=20)
CPU = torch.device("cpu")


def make_groups(rank: int, port: int) -> None:
    """Those of a mesh, flattened ones too, and one by hand."""
    store = dist.TCPStore("localhost", port, 2, is_master=rank == 0, timeout=TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=TIMEOUT)
    with default_timeout(TIMEOUT):
        mesh = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("a", "b", "c"))
        groups = [*mesh.get_all_groups(), mesh["a", "c"]._flatten("both").get_group(), dist.new_group()]
    assert {group._get_backend(CPU).options._timeout for group in groups} == {TIMEOUT}
    assert dist.new_group()._get_backend(CPU).options._timeout > TIMEOUT
    dist.barrier()  # the other rank has its groups, too
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_every_group_waits_as_long_as_the_first() -> None:
    spawn(make_groups, (free_port(),), nprocs=2)


def test_ranks_that_start_again_do_not_find_what_former_ranks_left(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = dist.TCPStore("localhost", 0, is_master=True)
    for name, value in {
        "TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "localhost", "MASTER_PORT": str(kept.port),
        "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    stores: list[Any] = []
    for start in ("0", "0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", start)
        stores.append(own_store(TIMEOUT))
    first, beside, again = stores
    first.set("address", "here")
    assert beside.check(["address"])
    assert not again.check(["address"])


@pytest.mark.parametrize("changed", [{"TORCHELASTIC_USE_AGENT_STORE": "False"}, {"WORLD_SIZE": "4"}])
def test_ranks_of_several_hosts_and_of_a_store_of_their_own_meet_as_torch_does(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, str]
) -> None:
    of_torchrun = {"TORCHELASTIC_USE_AGENT_STORE": "True", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, value in (of_torchrun | changed).items():
        monkeypatch.setenv(name, value)
    assert own_store(TIMEOUT) is None


@pytest.mark.parametrize(("rank", "wait_s", "is_told"), [(0, 0.2, True), (0, 0.0, False), (1, 0.05, False)])
def test_a_long_wait_for_other_ranks_is_told_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: int, wait_s: float, is_told: bool
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "there")
    monkeypatch.setenv("MASTER_PORT", "7")
    with waiting_told(rank, world_size=2, patience_s=0.03):
        time.sleep(wait_s)
    time.sleep(0.1)
    told = capsys.readouterr().err
    assert told.count("Rank 0 of 2 still waits for the others at there:7. If nobody started them") == is_told
    assert bool(told) == is_told
