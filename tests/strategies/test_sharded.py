"""FSDP, tensor parallel and both, on real ranks of the CPU; what is refused, without any."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
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

from comparison import largest_difference
from project.errors import UserError
from project.launch import agent
from project.launch.build import build
from project.launch.composition import config_folder
from project.launch.run import Run
from project.models.nets import GPT, MLP, ResidualCNN, ViT
from project.models.plan import ParallelPlan
from project.strategies.checkpoint_files import CHECKSUMS, damage
from project.strategies.mesh import check_no_copies
from project.strategies.placement import parallelize
from project.strategies.sharded import ShardedStrategy, check_divides
from project.strategies.sharded_checkpoint import spread_like

Metrics = dict[str, float]
Ranks = tuple[int, int]  # how many, and of those in a group of tensor parallel
Case = Callable[[str, Ranks | None], tuple[Path, Metrics]]
pytestmark = pytest.mark.timeout(240)
slow = pytest.mark.slow

FSDP, TENSOR, BOTH = (2, 1), (2, 2), (4, 2)
LAYOUTS = [FSDP, TENSOR, BOTH]
SGD = {"_target_": "torch.optim.SGD", "momentum": 0.9}
PLAIN_SGD = {"_target_": "torch.optim.SGD"}
ADAMW = {"_target_": "torch.optim.AdamW", "lr": 0.003}
CLIPPED = {"max_steps": 20, "gradient_clip_val": 0.1}
BF16 = {"max_steps": 10, "precision": "bf16-mixed"}

# Functions of sharded_ranks.py with their config, and the ranks that run them; None is one device without strategy.
CASES: dict[str, tuple[list[Ranks | None], str, dict[str, Any]]] = {
    "sgd": (
        [None, (1, 1), FSDP, TENSOR, BOTH, (4, 1), (4, 4)],
        "train",
        {"net": "mlp", "optimizer": SGD, "trainer_arguments": CLIPPED},
    ),
    "adamw": ([None, FSDP, TENSOR, BOTH], "train", {"net": "mlp", "optimizer": ADAMW, "trainer_arguments": CLIPPED}),
    "gpt": (
        [None, FSDP, TENSOR, BOTH],
        "train",
        {"net": "gpt", "optimizer": ADAMW, "trainer_arguments": CLIPPED | {"max_steps": 10}},
    ),
    "bf16": ([None, FSDP, TENSOR], "train", {"net": "mlp", "optimizer": SGD, "trainer_arguments": BF16}),
    "accumulate": ([FSDP, TENSOR, BOTH], "accumulate", {"net": "mlp", "optimizer": SGD}),
    "cycle_adamw": ([FSDP, BOTH], "cycle", {"net": "mlp", "optimizer": ADAMW}),
    "cycle_plain_sgd": ([TENSOR], "cycle", {"net": "mlp", "optimizer": PLAIN_SGD}),
    "cycle_single": ([FSDP], "cycle", {"net": "mlp", "optimizer": SGD, "strategy": {"save": "single"}}),
    "background": ([FSDP, TENSOR, BOTH], "background", {"net": "mlp", "optimizer": ADAMW}),
    "count": ([TENSOR, BOTH], "count", {}),
    "drop": ([TENSOR, BOTH], "drop", {"net": "gpt", "net_arguments": {"dropout": 0.5}, "optimizer": ADAMW}),
    "own": ([FSDP], "own", {}),
}


def launch(folder: Path, ranks: Ranks | None, cases: dict[str, dict[str, Any]]) -> None:
    """Run functions of sharded_ranks.py, one after the other, on the same ranks."""
    world_size, size = ranks or (1, 1)
    for case in cases.values():
        if ranks and case.get("strategy") != "ddp":
            case["strategy"] = {"tensor_parallel_size": size} | case.get("strategy", {})
    config = {
        "launch": {"threads_per_rank": 1, "timeout_s": 60},
        "trainer": {"accelerator": "cpu", "devices": world_size},
        "cases": cases,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parent)
        agent.run_ranks("sharded_ranks:run_cases", config, Run(folder, [], {}, started_at=time.time()), world_size)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """``case("sgd", (2, 1))``: folder and metrics; all cases of the same ranks are run together, once."""
    agent.warm_up()
    folders: dict[Ranks | None, Path] = {}

    def result(name: str, ranks: Ranks | None) -> tuple[Path, Metrics]:
        if ranks not in folders:
            folders[ranks] = tmp_path_factory.mktemp("ranks")
            cases = {
                case: {"function": function} | config
                for case, (layouts, function, config) in CASES.items()
                if ranks in layouts
            }
            launch(folders[ranks], ranks, cases)
        folder = folders[ranks] / name
        return folder, json.loads((folder / "metrics.json").read_text())

    return result


def weights(folder: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(folder / "weights.pt")
    return state


def assert_equal(one: tuple[Path, Metrics], many: tuple[Path, Metrics]) -> None:
    assert largest_difference(weights(one[0]), weights(many[0])) <= 1e-10
    for name, value in one[1].items():
        assert many[1][name] == pytest.approx(value, abs=1e-12, rel=0), name


@slow
@pytest.mark.parametrize("name", ["sgd", "adamw", "gpt"])  # gpt: tied weights, activation checkpoints
@pytest.mark.parametrize("ranks", LAYOUTS)
def test_weights_metrics_and_gradient_norm_are_those_of_one_device(case: Case, ranks: Ranks, name: str) -> None:
    one, many = case(name, None), case(name, ranks)
    assert {"train/grad_norm", "val/loss", "test/loss"} <= one[1].keys()
    assert_equal(one, many)


@slow
@pytest.mark.parametrize("ranks", [(4, 1), (4, 4)])
def test_four_ranks_train_as_one_device(case: Case, ranks: Ranks) -> None:
    assert_equal(case("sgd", None), case("sgd", ranks))


@slow
def test_one_rank_trains_as_without_the_strategy(case: Case) -> None:
    assert_equal(case("sgd", None), case("sgd", (1, 1)))


@slow
@pytest.mark.parametrize("ranks", [FSDP, TENSOR])
def test_every_parameter_is_spread_and_each_rank_holds_its_share(case: Case, ranks: Ranks) -> None:
    folder, _ = case("sgd", ranks)
    facts = [json.loads((folder / f"facts_{rank}.json").read_text()) for rank in range(2)]
    assert all(rank["all_spread"] for rank in facts)
    assert [rank["first_with_its_data"] for rank in facts] == [1.0, 1.0 if ranks == FSDP else 0.0]
    assert all(0.4 < rank["share"] < 0.75 for rank in facts)


@slow
@pytest.mark.parametrize("ranks", LAYOUTS)
def test_accumulating_four_batches_equals_one_of_four_times_the_size(case: Case, ranks: Ranks) -> None:
    assert case("accumulate", ranks)[1]["difference"] <= 1e-10


@slow
@pytest.mark.parametrize("ranks", [FSDP, TENSOR])
def test_bf16_mixed_trains_close_to_one_device(case: Case, ranks: Ranks) -> None:
    difference = largest_difference(weights(case("bf16", None)[0]), weights(case("bf16", ranks)[0]))
    assert 0 < difference <= 0.05  # partial sums are rounded to bf16, which has three digits


@slow
@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("cycle_adamw", FSDP),
        ("cycle_plain_sgd", TENSOR),
        ("cycle_single", FSDP),
        ("cycle_adamw", BOTH),
    ],
)
def test_checkpoints_test_and_resume_alike_before_and_after_they_are_one_file(
    case: Case, name: str, ranks: Ranks, tmp_path: Path
) -> None:
    folder, facts = case(name, ranks)
    assert facts["folders"] == float(name != "cycle_single")
    assert facts["test_after"] == facts["test_before"]
    assert facts["saved"] == 0
    assert facts["resumed_before"] <= 1e-12
    assert facts["resumed_after"] <= 1e-12
    # Of the shards nothing is left, and one device goes on where the ranks stopped.
    assert sorted(path.name for path in (folder / "half").iterdir()) == ["best.ckpt", "last.ckpt"]
    last = folder / "half" / "last.ckpt"
    assert torch.load(last, weights_only=True)["config"] == {"seed": 0}
    config = CASES[name][2]
    resume = {"function": "resume", "net": config["net"], "optimizer": config["optimizer"], "ckpt_path": str(last)}
    launch(tmp_path, None, {"resume": resume})
    assert largest_difference(weights(folder), weights(tmp_path / "resume")) <= 1e-10


@slow
@pytest.mark.parametrize("ranks", LAYOUTS)
def test_shards_written_in_the_background_are_those_of_their_moment(case: Case, ranks: Ranks) -> None:
    folder, facts = case("background", ranks)
    assert facts == {"complete": 1, "went_on": 1, "raised": 1, "told": 1}
    sums = {}
    for name in ("at_once", "meanwhile", "end"):
        assert damage(folder / f"{name}.ckpt") is None
        sums[name] = json.loads((folder / f"{name}.ckpt" / CHECKSUMS).read_text())
        del sums[name][".metadata"]  # which has an identity of its own
    assert sums["meanwhile"] == sums["at_once"] != sums["end"]
    assert not list(folder.glob("*.part"))


@slow
@pytest.mark.parametrize("ranks", [TENSOR, BOTH])
def test_each_row_is_counted_once_and_decisions_are_of_all_ranks(case: Case, ranks: Ranks) -> None:
    _, facts = case("count", ranks)
    assert facts == {"by_metric": 11, "by_log": 11, "all": 1, "not_all": 0, "any": 1}


@slow
def test_ranks_of_one_tensor_parallel_group_drop_the_same(case: Case) -> None:
    _, facts = case("drop", TENSOR)
    assert facts["apart"] == 0
    assert facts["drawn_0"] == facts["drawn_1"]


@slow
def test_groups_of_tensor_parallel_drop_differently(case: Case) -> None:
    _, facts = case("drop", BOTH)
    assert facts["drawn_0"] == facts["drawn_1"] != facts["drawn_2"] == facts["drawn_3"]


@slow
def test_a_module_that_shards_itself_is_left_as_it_is(case: Case) -> None:
    assert case("own", FSDP)[1]["sharded"] == 1


@slow
def test_batch_norm_trains_as_under_ddp_and_is_evaluated_as_it_is_saved(tmp_path: Path) -> None:
    config = {"function": "train", "net": "cnn", "optimizer": SGD, "trainer_arguments": {"max_steps": 4}}
    launch(tmp_path, FSDP, {"ddp": config | {"strategy": "ddp"}, "fsdp": config})
    ddp, fsdp = weights(tmp_path / "ddp"), weights(tmp_path / "fsdp")
    assert any("running_mean" in name for name in fsdp)
    assert largest_difference(ddp, fsdp) <= 1e-10
    saved = {"function": "evaluate", "net": "cnn", "optimizer": SGD, "weights": str(tmp_path / "fsdp" / "weights.pt")}
    launch(tmp_path, None, {"saved": saved})
    trained = json.loads((tmp_path / "fsdp" / "metrics.json").read_text())
    evaluated = json.loads((tmp_path / "saved" / "metrics.json").read_text())
    assert trained["test/loss"] == pytest.approx(evaluated["test/loss"], abs=1e-12, rel=0)


@slow
@pytest.mark.parametrize("ranks", [FSDP, TENSOR])
def test_a_compiled_net_trains_as_on_one_device(case: Case, ranks: Ranks, tmp_path: Path) -> None:
    launch(tmp_path, ranks, {"compiled": {"function": "train", "compile": "aot_eager"} | CASES["sgd"][2]})
    assert largest_difference(weights(case("sgd", None)[0]), weights(tmp_path / "compiled")) <= 1e-10


def test_what_a_rank_refuses_reaches_the_user(tmp_path: Path) -> None:
    agent.warm_up()
    with pytest.raises(UserError, match="ResidualCNN can't be split by tensor parallel.*trainer/strategy=fsdp"):
        launch(tmp_path, TENSOR, {"fail": {"function": "fail", "net": "cnn", "optimizer": SGD}})


# Without ranks: torch's "fake" backend stands for the others.


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
