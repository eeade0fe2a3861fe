"""The pipeline strategy on real ranks of the CPU; what is refused, without any."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torchmetrics import MeanMetric

from comparison import largest_difference
from project.errors import UserError
from project.launch import agent
from project.launch.build import build
from project.launch.composition import config_folder
from project.launch.run import Run
from project.models.nets import GPT, MLP
from project.strategies.pipeline import PipelineStrategy
from project.strategies.pipeline_checkpoint import own_optimizer_state
from project.strategies.pipeline_layout import PipelineLayout
from project.strategies.pipelined_net import PipelinedNet
from project.strategies.user_step import UserStep

Metrics = dict[str, float]
Ranks = tuple[int, int]  # how many, and of those in a pipeline
Case = Callable[[str, Ranks | None], tuple[Path, Metrics]]
pytestmark = pytest.mark.timeout(240)
slow = pytest.mark.slow

TWO, FOUR, TWICE_TWO = (2, 2), (4, 4), (4, 2)
SGD = {"_target_": "torch.optim.SGD", "momentum": 0.9}
ADAMW = {"_target_": "torch.optim.AdamW", "lr": 0.003, "foreach": True}
CLIPPED = {"max_steps": 20, "gradient_clip_val": 0.1}
MLP_SGD = {"net": "mlp", "optimizer": SGD, "trainer_arguments": CLIPPED}

# Functions of pipeline_ranks.py with their config, and the ranks that run them; None is one device without strategy.
CASES: dict[str, tuple[list[Ranks | None], str, dict[str, Any]]] = {
    "1f1b": ([None, TWO, FOUR, TWICE_TWO], "train", MLP_SGD),
    "gpipe": ([TWO, TWICE_TWO], "train", MLP_SGD | {"strategy": {"schedule": "gpipe", "micro_batches": 4}}),
    "interleaved": ([TWO, TWICE_TWO], "train", MLP_SGD | {"strategy": {"schedule": "interleaved"}}),
    "adamw": ([None, TWO, FOUR], "train", MLP_SGD | {"optimizer": ADAMW, "ema": True}),
    "gpt": (
        [None, TWO, TWICE_TWO],
        "train",
        {"net": "gpt", "net_arguments": {"tie_weights": False}, "optimizer": ADAMW}
        | {"trainer_arguments": CLIPPED | {"max_steps": 10}},
    ),
    "bf16": (
        [None, TWO],
        "train",
        {"net": "mlp", "optimizer": SGD, "trainer_arguments": {"max_steps": 10, "precision": "bf16-mixed"}},
    ),
    "batch_norm": ([TWO, TWICE_TWO], "train", {"net": "cnn", "optimizer": SGD, "trainer_arguments": {"max_steps": 4}}),
    "accumulate": ([TWO, TWICE_TWO], "accumulate", {"net": "mlp", "optimizer": SGD}),
    "cycle": ([TWO, TWICE_TWO], "cycle", {"net": "mlp", "optimizer": ADAMW}),
    "log": ([None, TWO, TWICE_TWO], "log", {}),
    "draw": ([TWO, TWICE_TWO], "draw", {}),
}


def launch(folder: Path, ranks: Ranks | None, cases: dict[str, dict[str, Any]]) -> None:
    """Run functions of pipeline_ranks.py, one after the other, on the same ranks."""
    world_size, size = ranks or (1, 1)
    for case in cases.values():
        given = case.get("strategy", {})
        stages = size * (2 if given.get("schedule") == "interleaved" else 1)
        case["strategy"] = {"stages": stages} | given
    config = {
        "launch": {"threads_per_rank": 1, "timeout_s": 60},
        "trainer": {"accelerator": "cpu", "devices": world_size},
        "cases": cases,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parent)
        agent.run_ranks("pipeline_ranks:run_cases", config, Run(folder, [], {}, started_at=time.time()), world_size)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """``case("1f1b", (2, 2))``: folder and metrics; all cases of the same ranks are run together, once."""
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


def weights(folder: Path) -> dict[str, Tensor]:
    state: dict[str, Tensor] = torch.load(folder / "weights.pt", weights_only=True)
    return state


def facts_of_ranks(folder: Path, ranks: Ranks) -> list[dict[str, Any]]:
    return [json.loads((folder / f"facts_{rank}.json").read_text()) for rank in range(ranks[0])]


@slow
@pytest.mark.parametrize(
    ("ranks", "name", "like"),
    [
        (TWO, "1f1b", "1f1b"),
        (TWO, "gpipe", "1f1b"),
        (TWO, "interleaved", "1f1b"),
        (TWO, "adamw", "adamw"),
        (TWO, "gpt", "gpt"),
        (FOUR, "1f1b", "1f1b"),
        (FOUR, "adamw", "adamw"),
        (TWICE_TWO, "1f1b", "1f1b"),
        (TWICE_TWO, "gpipe", "1f1b"),
        (TWICE_TWO, "interleaved", "1f1b"),
        (TWICE_TWO, "gpt", "gpt"),
    ],
)
def test_weights_metrics_and_gradient_norm_are_those_of_one_device(
    case: Case, ranks: Ranks, name: str, like: str
) -> None:
    one, many = case(like, None), case(name, ranks)
    assert largest_difference(weights(one[0]), weights(many[0])) <= 1e-10
    assert {"train/grad_norm", "val/loss", "test/loss"} <= one[1].keys()
    for metric, value in one[1].items():
        assert many[1][metric] == pytest.approx(value, abs=1e-12, rel=0), metric


@slow
@pytest.mark.parametrize("ranks", [TWO, TWICE_TWO])
def test_all_ranks_know_the_same_metrics_and_hold_their_stage_only(case: Case, ranks: Ranks) -> None:
    facts = facts_of_ranks(case("1f1b", ranks)[0], ranks)
    assert all(rank["metrics"] == facts[0]["metrics"] for rank in facts)
    assert [rank["first_with_its_data"] for rank in facts] == [1.0, 0.0] * (ranks[0] // 2)
    assert sum(rank["share"] for rank in facts) == pytest.approx(ranks[0] // ranks[1])
    assert all(rank["share"] < 0.75 for rank in facts)


@slow
@pytest.mark.parametrize("ranks", [TWO, TWICE_TWO])
def test_accumulating_four_batches_equals_one_of_four_times_the_size(case: Case, ranks: Ranks) -> None:
    assert case("accumulate", ranks)[1]["difference"] <= 1e-10


@slow
def test_bf16_mixed_trains_close_to_one_device(case: Case) -> None:
    difference = largest_difference(weights(case("bf16", None)[0]), weights(case("bf16", TWO)[0]))
    assert 0 < difference <= 0.05  # sums are rounded to bf16, which has three digits


@slow
@pytest.mark.parametrize("ranks", [TWO, TWICE_TWO])
def test_a_run_is_resumed_where_it_stopped_by_pipelines_and_by_one_device(
    case: Case, ranks: Ranks, tmp_path: Path
) -> None:
    folder, facts = case("cycle", ranks)
    assert facts["resumed"] <= 1e-12
    last = folder / "half" / "last.ckpt"
    checkpoint = torch.load(last, weights_only=True)
    parameters = [name for name in checkpoint["state_dict"] if name.startswith("net.")]
    state = checkpoint["optimizer_states"][0]["state"]
    assert list(state) == list(range(len(parameters)))
    assert all(state[i]["exp_avg"].shape == checkpoint["state_dict"][name].shape for i, name in enumerate(parameters))
    resume = {"function": "resume", "ckpt_path": str(last)} | CASES["cycle"][2]
    launch(tmp_path, None, {"resume": resume})
    assert largest_difference(weights(folder), weights(tmp_path / "resume")) <= 1e-10


@slow
@pytest.mark.parametrize("ranks", [TWO, TWICE_TWO])
def test_what_the_last_rank_logs_and_counts_is_logged_by_all_and_each_row_once(case: Case, ranks: Ranks) -> None:
    one, many = case("log", None)[1], case("log", ranks)[1]
    assert many["ranks_agree"] == 1
    assert (many["all"], many["not_all"]) == (1, 0)
    assert (many["by_metric"], many["by_log"], many["train/rows"]) == (11, 11, 40)
    assert many["seen"] == 80 * ranks[1] / ranks[0]  # each pipeline counts its share
    for name in ("train/accuracy", "train/logged_loss", "train/mean"):
        assert many[name] == pytest.approx(one[name], abs=1e-6), name  # metrics count in float32


@slow
@pytest.mark.parametrize("ranks", [TWO, TWICE_TWO])
def test_the_step_draws_alike_on_the_ranks_of_a_pipeline_and_anew_in_each_micro_batch(case: Case, ranks: Ranks) -> None:
    _, facts = case("draw", ranks)
    assert facts["lost"] <= 1e-12
    assert facts["most"] - facts["least"] > 0.5
    drawn = [facts[f"drawn_{rank}"] for rank in range(ranks[0])]
    assert len(set(drawn)) == len(drawn)  # their dropout is their own


@slow
@pytest.mark.parametrize("ranks", [TWO, TWICE_TWO])
def test_batch_norm_is_evaluated_as_it_is_saved(case: Case, ranks: Ranks, tmp_path: Path) -> None:
    folder, trained = case("batch_norm", ranks)
    saved = {"function": "evaluate", "net": "cnn", "optimizer": SGD, "weights": str(folder / "weights.pt")}
    launch(tmp_path, None, {"saved": saved})
    evaluated = json.loads((tmp_path / "saved" / "metrics.json").read_text())
    assert trained["test/loss"] == pytest.approx(evaluated["test/loss"], abs=1e-12, rel=0)


@slow
def test_a_step_that_only_the_last_rank_can_judge_is_told_to_the_user(tmp_path: Path) -> None:
    agent.warm_up()
    with pytest.raises(UserError, match="TwoCalls.training_step calls net more than once.*trainer/strategy=fsdp"):
        launch(tmp_path, TWO, {"fail": {"function": "fail"}})


# Without ranks: torch's "fake" backend stands for the others.


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """The first of two ranks."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (1, 2), mesh_dim_names=("data_parallel", "pipeline"))["pipeline"].get_group()
    dist.destroy_process_group()


def cut(net: nn.Module, group: dist.ProcessGroup, **layout: Any) -> PipelinedNet:
    return PipelinedNet(net, "net", PipelineLayout("1f1b", 2, **layout), group, torch.device("cpu"), nullcontext)


def test_a_rank_keeps_its_own_parts_and_all_names(group: dist.ProcessGroup) -> None:
    net = MLP([1, 4, 4], 10, width=8, depth=2)
    shapes = {name: p.shape for name, p in net.named_parameters()}
    pipelined = cut(net, group)
    assert pipelined.is_first
    assert not pipelined.is_last
    assert {name: p.shape for name, p in net.named_parameters()} == shapes
    assert [name for name, p in net.named_parameters() if not p.is_meta] == ["layers.1.weight", "layers.1.bias"]


@pytest.mark.parametrize(
    ("net", "sentence"),
    [
        (lambda: GPT(10, 8, 8, 2, 2), "embedding.*are one tensor.*model.net.tie_weights=false"),
        (lambda: nn.Sequential(nn.Linear(2, 2)), "1 parts .* too few for 2 stages"),
        (lambda: nn.Linear(2, 2), "Linear can't be cut into stages"),
    ],
)
def test_nets_that_cannot_be_cut_are_refused(
    group: dist.ProcessGroup, net: Callable[[], nn.Module], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        cut(net(), group)


@pytest.mark.parametrize("call", [lambda net: net(), lambda net: net([1]), lambda net: net(torch.zeros(()))])
def test_a_net_takes_one_tensor_with_a_batch(group: dist.ProcessGroup, call: Callable[[Any], Any]) -> None:
    class Any2(nn.Sequential):
        def forward(self, x: Any = None) -> Any:
            return super().forward(x)

    net = Any2(nn.Linear(2, 2), nn.Linear(2, 2))
    net.parallel_plan = MLP([1, 1, 1], 2).parallel_plan.__class__(chain=("0", "1"))
    with pytest.raises(UserError, match="net is called with .* passes on one tensor"):
        call(cut(net, group))


class Step(L.LightningModule):
    """A training step of any kind, in one of its parts."""

    def __init__(self, step: Callable[["Step", Tensor], Any]) -> None:
        super().__init__()
        self.mean = MeanMetric()
        self.step = step

    def net(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.step(self, batch)


def user_step(step: Callable[[Step, Tensor], Any]) -> UserStep:
    net = SimpleNamespace(name="net", device=torch.device("cpu"), is_last=True, intercept=None)
    module = Step(step)
    module.__dict__["net"] = lambda x: net.intercept(x)
    running = UserStep(module, net, nullcontext)  # type: ignore[arg-type]
    running.begin()
    return running


def test_a_step_is_run_as_far_as_the_call_and_from_there_to_the_loss() -> None:
    def step(module: Step, batch: Tensor) -> Tensor:
        try:
            noise = torch.rand(())
            return (module.net(2 * batch + noise) - noise).sum()  # type: ignore[no-any-return]
        except Exception:
            return torch.tensor(-1.0)

    running = user_step(step)
    before = torch.get_rng_state()
    x = running.input_of((torch.ones(3), 0), seed=1)
    output = x.clone().requires_grad_()
    loss = running.loss_of((torch.ones(3), 0), output, seed=1)
    assert float(loss.detach()) == pytest.approx(6)
    loss.backward()
    assert output.grad is not None
    assert torch.equal(before, torch.get_rng_state())
    assert "log" not in vars(running.module)


@pytest.mark.parametrize(
    ("step", "sentence"),
    [
        (lambda m, x: m.net(x) + m.net(x), "calls net more than once"),
        (lambda m, x: m.net(x), r"returns a tensor \(3,\) as the loss"),
        (lambda m, x: {"logits": m.net(x)}, "returns NoneType as the loss"),
    ],
)
def test_steps_that_cannot_be_cut_are_refused(step: Callable[[Step, Tensor], Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        user_step(step).loss_of((torch.ones(3), 0), torch.ones(3), seed=0)


def test_a_step_must_call_the_net() -> None:
    with pytest.raises(UserError, match="does not call net.*trainer.strategy.modules"):
        user_step(lambda m, x: x.sum()).input_of((torch.ones(3), 0), seed=0)


def test_what_a_step_logs_and_counts_is_told_once_for_all_micro_batches() -> None:
    def step(module: Step, batch: Tensor) -> Tensor:
        loss = module.net(batch).sum()
        module.mean.update(loss)
        module.log("mean", module.mean)
        module.log("loss", loss, prog_bar=True)
        module.log("rows", len(batch), reduce_fx="sum")
        return loss

    running = user_step(step)
    assert running.told() == {}
    for value in (1.0, 2.0):
        running.loss_of((torch.ones(3), 0), torch.full((3,), value), seed=0)
    told = running.told()
    assert told["logged"] == {
        "mean": ((), {}, "mean"), "loss": ((), {"prog_bar": True}, 4.5), "rows": ((), {"reduce_fx": "sum"}, 6.0),
    }  # fmt: skip
    assert told["metrics"]["mean"]["_update_count"] == 2

    other = user_step(step)
    other.net = SimpleNamespace(device=torch.device("cpu"), is_last=False)  # type: ignore[assignment]
    logged = {}
    other.module.__dict__["log"] = lambda name, value, **kwargs: logged.update({name: value})
    other.hear(told)
    assert float(other._metrics["mean"].compute()) == 4.5
    assert float(logged["loss"]) == 4.5
    assert logged["mean"] is other._metrics["mean"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda m, s: m.register_parameter("scale", nn.Parameter(torch.ones(()))),
            "scale is a parameter outside of net",
        ),
        (lambda m, s: setattr(s.precision_plugin, "scaler", object()), "type trainer.precision=bf16-mixed"),
        (lambda m, s: m.add_module("norm", nn.SyncBatchNorm(2, affine=False)), "can't synchronise batch norm"),
    ],
)
def test_models_that_cannot_be_trained_so_are_refused(change: Callable[[Any, Any], None], sentence: str) -> None:
    model = L.LightningModule()
    model.net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    strategy = PipelineStrategy()
    strategy.precision_plugin = L.pytorch.plugins.Precision()
    strategy._refuse_what_cannot_work(model, model.net)
    change(model, strategy)
    with pytest.raises(UserError, match=sentence):
        strategy._refuse_what_cannot_work(model, model.net)


def test_only_one_module_is_cut() -> None:
    with pytest.raises(UserError, match=r"are several.*type trainer.strategy.modules=\[encoder\]"):
        PipelineStrategy(modules=["encoder", "decoder"])


def test_an_optimizer_gets_the_state_of_the_parameters_that_the_rank_has() -> None:
    own, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3, device="meta"))
    optimizer = torch.optim.Adam([other, own])
    state = {"param_groups": [{"params": [0, 1]}], "state": {0: {"step": torch.ones(())}, 1: {"step": torch.ones(())}}}
    assert list(own_optimizer_state(state, optimizer)["state"]) == [1]


def test_the_config_builds_the_strategy() -> None:
    config = OmegaConf.load(config_folder() / "trainer" / "strategy" / "pipeline.yaml")
    strategy = build(OmegaConf.to_container(config), "strategy")  # type: ignore[arg-type]
    assert isinstance(strategy, PipelineStrategy)
    assert strategy.modules == ["net"]
