"""What is known of FSDP's communication; torch's "fake" backend stands for the other rank."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from project.tracking.fsdp_times import TimedShards


@pytest.fixture
def net() -> Iterator[nn.Module]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    fully_shard(net[0], mesh=mesh)
    yield fully_shard(net, mesh=mesh)
    dist.destroy_process_group()


@contextmanager
def phase(name: str) -> Iterator[None]:
    SEEN.append(name)
    yield


SEEN: list[str] = []


def step(net: nn.Module) -> int:
    """How often the phase was entered."""
    SEEN.clear()
    net(torch.ones(3, 4)).sum().backward()
    assert set(SEEN) <= {"shards"}
    return len(SEEN)


def test_each_exchange_runs_in_a_phase_of_its_own(net: nn.Module) -> None:
    timed = TimedShards(nn.ModuleList([net]), phase, on_cpu=True)
    # Weights of both layers, those of the first once more for backward, and the gradients of both.
    assert step(net) == 5
    timed.remove()
    assert step(net) == 0


def test_beside_the_computation_nothing_is_known(net: nn.Module) -> None:
    TimedShards(net, phase, on_cpu=False)
    assert step(net) == 0


@pytest.mark.parametrize("model", [nn.Linear(1, 1), None])
def test_without_fsdp_nothing_is_known(model: nn.Module | None) -> None:
    TimedShards(model, phase, on_cpu=True).remove()
