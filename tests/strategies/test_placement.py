"""Where fsdp and tensor parallel put a module's parameters; torch's "fake" backend stands for the other ranks."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EMAWeightAveraging
from omegaconf import OmegaConf
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from project.config.build import build
from project.config.composition import config_folder
from project.errors import UserError
from project.models.nets import GPT, MLP, ResidualCNN, ViT
from project.models.plan import ParallelPlan
from project.strategies.mesh import check_no_copies
from project.strategies.placement import parallelize
from project.strategies.sharded import ShardedStrategy, check_divides
from project.strategies.sharded_checkpoint import spread_like


@pytest.fixture
def mesh() -> Iterator[Callable[[int, int], Any]]:
    """``mesh(2, 1)``: two ranks of data parallel, of which this is the first."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def make(data_parallel: int, tensor_parallel: int) -> Any:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=data_parallel * tensor_parallel)
        return init_device_mesh(
            "cpu", (data_parallel, tensor_parallel), mesh_dim_names=("data_parallel", "tensor_parallel")
        )

    yield make
    if dist.is_initialized():
        dist.destroy_process_group()


class Holder(L.LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net


def mlp(**arguments: Any) -> MLP:
    return MLP([1, 4, 4], 10, **arguments)


def sharded(module: nn.Module) -> list[str]:
    return [name for name, part in module.named_modules() if isinstance(part, FSDPModule)]


@pytest.mark.parametrize(
    ("net", "blocks"),
    [
        (lambda: GPT(10, 8, width=8, depth=2, heads=2), ["net", "net.blocks.0", "net.blocks.1"]),
        (lambda: ViT([1, 4, 4], 10, width=8, depth=1, heads=2), ["net", "net.blocks.0"]),
        (lambda: mlp(width=8, depth=1), ["net", "net.layers.1", "net.layers.4"]),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), ["net", "net.0", "net.2"]),
        (lambda: nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), ["net.0", "net.1"]),
        (lambda: nn.Linear(4, 4), ["net"]),
    ],
)
def test_fsdp_gathers_the_blocks_of_the_plan_or_the_parts_of_lists_and_sequences(
    mesh: Callable[[int, int], Any], net: Callable[[], nn.Module], blocks: list[str]
) -> None:
    module = Holder(net())
    parallelize(module, mesh(2, 1))
    assert sharded(module) == blocks


def test_parts_that_share_a_parameter_are_gathered_together(mesh: Callable[[int, int], Any]) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    net[2].weight = net[0].weight
    module = Holder(net)
    parallelize(module, mesh(2, 1))
    assert sharded(module) == ["net", "net.1"]
    assert net[2].weight is net[0].weight


def test_tensor_parallel_splits_what_the_plan_says(mesh: Callable[[int, int], Any]) -> None:
    module = Holder(GPT(10, 8, width=8, depth=1, heads=2))
    parallelize(module, mesh(1, 2))
    local = {name: tuple(parameter.to_local().shape) for name, parameter in module.net.named_parameters()}
    assert local["blocks.0.attention.q.weight"] == (4, 8)
    assert local["blocks.0.attention.out.weight"] == (8, 4)
    assert local["blocks.0.mlp.up.bias"] == (16,)
    assert local["blocks.0.mlp.down.weight"] == (8, 16)
    assert local["embedding.tokens.weight"] == (10, 8)
    assert module.net.head.weight is module.net.embedding.tokens.weight


@pytest.mark.parametrize(("depth", "split"), [(1, [1, 4]), (2, [1, 4]), (3, [1, 4, 7, 10])])
def test_linear_layers_of_the_mlp_are_split_as_far_as_they_pair(depth: int, split: list[int]) -> None:
    plan = mlp(width=8, depth=depth).parallel_plan
    assert sorted((*plan.columns, *plan.rows)) == sorted(f"layers.{index}" for index in split)


class Planned(nn.Module):
    def __init__(self, plan: Any) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)
        self.norm = nn.LayerNorm(6)
        self.parallel_plan = plan

    def forward(self, x: torch.Tensor) -> Any:
        return self.norm(self.up(x))


@pytest.mark.parametrize(
    ("net", "size", "sentence"),
    [
        (lambda: ResidualCNN([1, 4, 4], 10, width=4), 2, "ResidualCNN can't be split by tensor parallel"),
        (lambda: mlp(width=6), 4, r"MLP.layers.1 has 6 output features, and 4 ranks .*tensor_parallel_size=2"),
        (lambda: GPT(10, 8, width=12, depth=1, heads=3), 2, "GPT has 3 attention heads, and 2 ranks"),
        (lambda: Planned(ParallelPlan(columns=("upp",))), 2, "names upp, and no module is called so: did you mean up?"),
        (lambda: Planned(ParallelPlan(blocks=("blocks.*",))), 2, r"names blocks.\*, .*: it has norm, up"),
        (lambda: Planned(ParallelPlan(columns=("norm",))), 2, "splits norm, which is a LayerNorm"),
        (lambda: Planned({"columns": ["up"]}), 2, "parallel_plan is a dict"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(
    mesh: Callable[[int, int], Any], net: Callable[[], nn.Module], size: int, sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        parallelize(Holder(net()), mesh(1, size))


def test_a_parameter_outside_of_any_net_is_refused(mesh: Callable[[int, int], Any]) -> None:
    module = Holder(nn.Linear(2, 2))
    module.scale = nn.Parameter(torch.ones(1))
    with pytest.raises(UserError, match="Holder.scale is a parameter outside of any net"):
        parallelize(module, mesh(2, 1))


class TwoNets(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Sequential(nn.Linear(4, 4)), mlp(width=4)


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)])
def test_a_parameter_of_two_nets_is_refused(mesh: Callable[[int, int], Any], ranks: tuple[int, int]) -> None:
    module = TwoNets()
    module.decoder.layers[-1].bias = module.encoder[0].bias
    told = r"encoder.0.bias and decoder.layers.\d+.bias of TwoNets are one parameter of two nets, .*strategy=ddp"
    with pytest.raises(UserError, match=told):
        parallelize(module, mesh(*ranks))


def test_a_net_that_is_part_of_another_is_gathered_before_it(mesh: Callable[[int, int], Any]) -> None:
    module = L.LightningModule()
    backbone = nn.Linear(4, 4)
    module.net = Planned(ParallelPlan())
    module.net.backbone = module.backbone = backbone
    parallelize(module, mesh(2, 1))  # torch refuses the other order
    assert sharded(module) == ["net", "net.backbone"]


def test_a_planned_block_that_shares_a_parameter_is_gathered_with_the_net(mesh: Callable[[int, int], Any]) -> None:
    net = Planned(ParallelPlan(blocks=("up", "norm")))
    net.norm.bias = net.up.bias
    module = Holder(net)
    parallelize(module, mesh(2, 1))
    assert sharded(module) == ["net"]
    assert net.norm.bias is net.up.bias


def test_a_layer_that_shares_its_weight_is_not_split(mesh: Callable[[int, int], Any]) -> None:
    net = Planned(ParallelPlan(columns=("up",)))
    net.norm.bias = net.up.bias
    with pytest.raises(UserError, match=r"up.bias and net.norm.bias are one parameter, .*strategy=fsdp"):
        parallelize(Holder(net), mesh(1, 2))


def test_ranks_that_are_no_multiple_of_the_group_are_refused() -> None:
    with pytest.raises(
        UserError, match="trainer.devices=3 is no multiple .*tensor_parallel_size=2: type trainer.devices=4"
    ):
        check_divides(2, 3)


@pytest.mark.parametrize("arguments", [{"tensor_parallel_size": 0}, {"tensor_parallel_size": "all"}, {"save": "both"}])
def test_arguments_that_cannot_be_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="type"):
        ShardedStrategy(**arguments)


def test_averaged_weights_are_refused() -> None:
    trainer = SimpleNamespace(callbacks=[EMAWeightAveraging()])
    with pytest.raises(UserError, match="EMAWeightAveraging keeps a copy"):
        check_no_copies(trainer)  # type: ignore[arg-type]


def test_a_checkpoint_of_another_architecture_is_told_as_torch_tells_it(mesh: Callable[[int, int], Any]) -> None:
    module = Holder(mlp(width=8))
    parallelize(module, mesh(2, 1))
    own = module.state_dict()
    stored = Holder(mlp(width=6)).state_dict()
    state = {name: spread_like(value, own.get(name)) for name, value in stored.items()}
    with pytest.raises(RuntimeError, match=r"Error\(s\) in loading state_dict(.|\n)*size mismatch for net.layers.1"):
        module.load_state_dict(state)


@pytest.mark.parametrize(("name", "size"), [("fsdp", 1), ("tensor_parallel", "auto"), ("fsdp_tensor_parallel", 2)])
def test_each_config_builds_its_strategy(name: str, size: int | str) -> None:
    config = OmegaConf.load(config_folder() / "trainer" / "strategy" / f"{name}.yaml")
    strategy = build(OmegaConf.to_container(config), "strategy")  # type: ignore[arg-type]
    assert isinstance(strategy, ShardedStrategy)
    assert strategy.tensor_parallel_size == size


@pytest.mark.parametrize("ranks", [(2, 1), (2, 2)])
def test_weights_with_channels_innermost_are_sharded_too(
    mesh: Callable[[int, int], Any], ranks: tuple[int, int]
) -> None:
    module = L.LightningModule()
    module.net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), MLP(image_shape=(4,), num_classes=4, width=8)
    ).to(memory_format=torch.channels_last)
    parallelize(module, mesh(*ranks))
    assert isinstance(module.net, FSDPModule)
