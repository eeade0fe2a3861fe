"""DDP's buckets: read from one model, begun with by the next."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from project.strategies.ddp_buckets import Buckets, begin_with, bucketed, buckets_of, fit, parsed

SMALL_MB = 200 / 2**20  # reached by a layer of 288 bytes


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def ddp(layers: int = 3, **options: object) -> DistributedDataParallel:
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))
    return DistributedDataParallel(net, **{"bucket_cap_mb": SMALL_MB, **options})  # type: ignore[arg-type]


def step(model: nn.Module, times: int = 1) -> None:
    for _ in range(times):
        model(torch.ones(2, 8)).sum().backward()


def first_sizes(model: DistributedDataParallel) -> list[int]:
    """Bytes of the buckets that it was built with."""
    return [int(size) for size in model._get_ddp_logging_data()["bucket_sizes"].split(", ")]  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("steps", [1, 2, 3, 20])
def test_buckets_are_known_after_any_step(group: None, steps: int) -> None:
    model = ddp()
    assert buckets_of(model) is None
    step(model, steps)
    assert buckets_of(model) == [[5, 4], [3, 2], [1, 0]]
    step(model)  # goes on training


def test_model_begins_with_the_buckets_of_another(group: None) -> None:
    own, layer = first_sizes(ddp()), (8 * 8 + 8) * 4
    assert own == [3 * layer]
    before = ddp()
    step(before)
    buckets = buckets_of(before)
    assert buckets is not None
    strategy = DDPStrategy(bucket_cap_mb=SMALL_MB)
    strategy.parallel_devices, strategy._local_rank = [torch.device("cpu")], 0
    begin_with(strategy, buckets)
    after = strategy._setup_model(nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))))
    assert first_sizes(after) == [layer] * 3
    step(after)
    assert buckets_of(after) == buckets
    assert first_sizes(ddp()) == own


def test_buckets_of_another_model_are_left_alone(group: None) -> None:
    with bucketed([[5, 4], [3, 2], [1, 0]]):
        model = ddp(layers=2)
    assert len(first_sizes(model)) == 1
    step(model, 2)


def test_models_whose_buckets_stay_have_none_to_keep(group: None) -> None:
    model = ddp(find_unused_parameters=True)
    step(model, 3)
    assert buckets_of(model) is None
    assert buckets_of(nn.Linear(1, 1)) is None


def test_step_that_left_a_parameter_out_is_no_error_of_saving(group: None) -> None:
    model = ddp()
    model.module[2](model(torch.ones(2, 8)).detach()).sum().backward()
    assert buckets_of(model) is None


@pytest.mark.parametrize(
    ("text", "buckets"), [("5 4 3, 2, 1 0", [[5, 4, 3], [2], [1, 0]]), ("0", [[0]]), ("", None), ("[5, 4]", None)]
)
def test_buckets_are_read_as_torch_writes_them(text: str, buckets: Buckets | None) -> None:
    assert parsed(text) == buckets


@pytest.mark.parametrize(
    ("buckets", "fits"),
    [
        ([[2, 1], [0]], True),
        ([[1, 0]], False),  # one too few
        ([[3, 2], [1, 0]], False),  # one too many
        ([[2, 1], [1, 0]], False),  # one twice
        ([[2], [], [1, 0]], False),
        ([[2, 1, 0]], False),  # of two kinds
    ],
)
def test_buckets_fit_where_each_parameter_is_in_one_with_its_kind(buckets: Buckets, fits: bool) -> None:
    parameters = [torch.ones(1), torch.ones(1).double(), torch.ones(1).double()]
    assert fit(buckets, parameters, [False] * 3) is fits


def test_sparse_gradient_fits_a_bucket_of_its_own_only() -> None:
    assert fit([[1], [0]], [torch.ones(1)] * 2, [False, True])
    assert not fit([[1, 0]], [torch.ones(1)] * 2, [False, True])
