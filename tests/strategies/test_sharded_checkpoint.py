"""Shards that are written beside the training: their copy, and a thread whose rank is left alone."""

import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from project.launch import agent
from project.strategies.checkpoint_files import copy_to_host


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Two ranks, of which this is the first; torch's "fake" backend stands for the other."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def test_copy_in_the_hosts_memory_is_of_the_shard_and_apart_from_training(mesh: DeviceMesh) -> None:
    weight = DTensor.from_local(torch.zeros(2, 3), mesh, [Shard(0)])
    copied = copy_to_host(({"weight": weight, "tied": weight}, {"own": weight.to_local()}))
    weight.to_local().fill_(5)
    assert copied[0]["weight"] is copied[0]["tied"]
    assert copied[0]["weight"].to_local().tolist() == copied[1]["own"].tolist() == [[0] * 3] * 2
    assert (copied[0]["weight"].shape, copied[0]["weight"].placements) == ((4, 3), (Shard(0),))
    assert not isinstance(copied[1]["own"], DTensor)


def test_shards_of_which_this_rank_has_nothing_keep_their_shapes(mesh: DeviceMesh) -> None:
    shapes = torch.Size([1, 3]), torch.Size([0, 3])
    weights = [DTensor.from_local(torch.zeros(0, 3), mesh, [Shard(0)], shape=shape, stride=(3, 1)) for shape in shapes]
    assert [copy.shape for copy in copy_to_host(weights)] == list(shapes)


@pytest.mark.slow
def test_rank_whose_thread_waits_for_a_dead_one_ends_by_itself(tmp_path: Path) -> None:
    agent.warm_up()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parent)
        from sharded_ranks import wait_for_the_dead

        context = multiprocessing.get_context("forkserver")
        ranks = [context.Process(target=wait_for_the_dead, args=(rank, tmp_path), daemon=True) for rank in range(2)]
        for rank in ranks:
            rank.start()
    for rank in ranks:
        rank.join(20)
    assert [rank.exitcode for rank in ranks] == [1, -9]
