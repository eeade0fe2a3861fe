"""DDP's own notes of its communication, as they are and where they are missing."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from project.tracking.ddp_times import DDPTimes, TimedBuffers


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DistributedDataParallel]:
    store: Path = tmp_path_factory.mktemp("store") / "file"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    try:
        yield DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    finally:
        dist.destroy_process_group()


def train(ddp: DistributedDataParallel, steps: int) -> None:
    for _ in range(steps):
        ddp(torch.randn(8, 4)).sum().backward()


def test_the_installed_torch_tells_of_its_communication(ddp: DistributedDataParallel) -> None:
    """Private to torch: if this fails, `sync` is unknown until `DDPTimes` is mended."""
    times = DDPTimes(ddp, sample_every=1)
    for _ in range(4):
        train(ddp, 1)
        times.read()
    exposed_ms, overlap_ms = times.take(1.0)
    assert 0 <= exposed_ms < 1000
    assert 0 <= overlap_ms < 1000


class Told:
    """What DDP tells, by hand; nanoseconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ddp: DistributedDataParallel) -> None:
        self.data: dict[str, Any] = {}
        monkeypatch.setattr(ddp, "_get_ddp_logging_data", lambda: self.data)


def test_exposed_is_communication_that_was_not_hidden(
    ddp: DistributedDataParallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told(monkeypatch, ddp)
    times = DDPTimes(ddp, 1)
    for iteration in (1, 2, 2):  # the second is read twice
        told.data = {
            "iteration": iteration,
            "backward_comm_time": 10_000_000 * iteration,
            "backward_compute_comm_overlap_time": 4_000_000,
        }
        times.read()
    assert times.take(1.0) == ((6 + 16) / 2, 4)
    assert all(math.isnan(value) for value in times.take(1.0))


def test_under_accumulation_a_batch_has_its_share(
    ddp: DistributedDataParallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told(monkeypatch, ddp)
    times = DDPTimes(ddp, 1)
    told.data = {"iteration": 1, "backward_comm_time": 8_000_000, "backward_compute_comm_overlap_time": 0}
    times.read()
    assert times.take(1 / 4) == (2, 0)


@pytest.mark.parametrize("model", [nn.Linear(1, 1), None])
def test_without_ddp_nothing_is_known(model: Any) -> None:
    times = DDPTimes(model, 1)
    times.read()
    assert all(math.isnan(value) for value in times.take(1.0))
    TimedBuffers(model, pytest.fail).remove()


def test_the_broadcast_of_buffers_runs_in_a_phase_of_its_own(ddp: DistributedDataParallel) -> None:
    seen: list[str] = []

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        seen.append(name)
        yield

    buffers = TimedBuffers(ddp, phase)
    train(ddp, 2)
    number = len(seen)
    assert set(seen) <= {"buffers"}
    assert number >= 1
    buffers.remove()
    train(ddp, 1)
    assert len(seen) == number
