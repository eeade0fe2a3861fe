"""Nets and steps that a pipeline cuts, and what it refuses; without ranks: torch's "fake" backend stands for them."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
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

from project.config.build import build
from project.config.composition import config_folder
from project.errors import UserError
from project.models.nets import GPT, MLP
from project.strategies.pipeline import PipelineStrategy
from project.strategies.pipeline_checkpoint import own_optimizer_state
from project.strategies.pipeline_layout import PipelineLayout
from project.strategies.pipelined_net import PipelinedNet
from project.strategies.user_step import UserStep
from project.tracking.arrivals import OWN_GROUP

Metrics = dict[str, float]


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


def test_weights_are_gathered_over_the_cpu_by_the_first_pipeline(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four ranks in two pipelines; a group of its own, which the tracker does not look at."""
    made: list[tuple[Any, ...]] = []
    monkeypatch.setattr(dist, "new_group", lambda *ranks, **named: made.append((*ranks, named)) or group)
    strategy = PipelineStrategy()
    strategy._device_mesh = SimpleNamespace(mesh=torch.arange(4).view(2, 2))
    for _ in range(2):
        assert strategy._savers is group
    assert made == [([0, 1], {"backend": "gloo", "group_desc": OWN_GROUP})]


def test_the_config_builds_the_strategy() -> None:
    config = OmegaConf.load(config_folder() / "trainer" / "strategy" / "pipeline.yaml")
    strategy = build(OmegaConf.to_container(config), "strategy")  # type: ignore[arg-type]
    assert isinstance(strategy, PipelineStrategy)
    assert strategy.modules == ["net"]
