"""What the strategy dp makes of a module's forward: modes, random numbers, buffers, inputs, errors, and CUDA."""

import contextlib
import copy
import io
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from data_parallel_training import Counting, fitted, forward, trainer
from project.errors import UserError
from project.strategies.data_parallel import DataParallelStrategy, ParallelForward
from small_classifier import (
    CLASSES,
    Classifier,
    batches,
    largest_difference,
    loader,
    mlp,
)

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


# Modes, random numbers, buffers, copies


class Probe(nn.Module):
    """Notes in which modes its replicas run."""

    seen: list[tuple[Any, ...]] = []  # noqa: RUF012  (of the class, so that replicas share it)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear(x)
        autocast = (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
        )
        self.seen.append((len(x), output.dtype, *autocast, torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        return output


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize(
    "mode",
    [
        contextlib.nullcontext,
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.autocast("cpu", torch.float16, cache_enabled=False),
    ],
)
def test_replicas_run_in_the_modes_of_the_caller(threaded: bool, mode: Callable[[], Any]) -> None:
    Probe.seen.clear()
    x = torch.randn(5, 6)
    net = Probe()
    with mode():
        expected = net(x)
        actual = forward(net, 3, threaded)(x)
    plain, *replicas = Probe.seen
    assert sorted(seen[0] for seen in replicas) == [1, 2, 2]
    assert {seen[1:] for seen in replicas} == {plain[1:]}
    assert actual.dtype == expected.dtype
    assert actual.requires_grad == expected.requires_grad
    assert actual.is_inference() == expected.is_inference()
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("threaded", [False, True])
def test_mixed_precision_reaches_every_replica(threaded: bool) -> None:
    Probe.seen.clear()
    model = Classifier(Probe())
    parallel = trainer(2, DataParallelStrategy(threaded=threaded), precision="bf16-mixed")
    parallel.fit(model, loader([8, 8], dtype=torch.float32), loader([8], dtype=torch.float32))
    assert len(Probe.seen) == 6
    assert {seen[1] for seen in Probe.seen} == {torch.bfloat16}
    assert model.net.linear.weight.dtype == torch.float32


def test_dropout_is_reproducible() -> None:
    net = mlp(dropout=0.5)
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        models.append(fitted(3, Classifier(copy.deepcopy(net))))
    assert largest_difference(*models) == 0.0
    forward(net, 4).train()
    x = torch.ones(4, 6)
    assert len({tuple(row.tolist()) for row in net(x)}) == 4  # and each replica has noise of its own


@pytest.mark.parametrize("threaded", [False, True])
def test_buffers_are_those_of_replica_0(threaded: bool) -> None:
    net = Counting().double()
    x = torch.randn(7, 6, dtype=torch.float64)
    expected = copy.deepcopy(net)
    expected(x[:3])  # the first of the chunks 3, 3, 1 would leave these
    with contextlib.suppress(ValueError):  # of batch norm, for the chunk of one
        forward(net, 3, threaded)(x)
    net = forward(Counting().double(), 3, threaded)
    net(x[:6])
    assert net.in_place == 2
    assert net.replaced == 2
    assert net.norm.num_batches_tracked == 1
    torch.testing.assert_close(net.norm.running_mean, 0.1 * x[:2].mean(0))


def test_hooks_of_the_module_see_the_full_batch_once() -> None:
    net = forward(mlp(), 3)
    sizes: list[int] = []
    inner: list[int] = []
    net.register_forward_hook(lambda module, args, output: sizes.append(len(output)))
    net[0].register_forward_hook(lambda module, args, output: inner.append(len(output)))
    net(torch.randn(8, 6))
    assert sizes == [8]
    assert inner == [3, 3, 2]


def test_an_observer_is_entered_around_each_replica() -> None:
    observed: list[tuple[int, str, str]] = []

    @contextlib.contextmanager
    def observe(index: int, device: torch.device) -> Iterator[None]:
        observed.append((index, str(device), "in"))
        yield
        observed.append((index, str(device), "out"))

    strategy = DataParallelStrategy()
    strategy.observe_replica = observe
    fitted(2, Classifier(), [4], strategy=strategy)
    assert observed == [(0, "cpu", "in"), (0, "cpu", "out"), (1, "cpu", "in"), (1, "cpu", "out")]


def test_a_copy_made_during_a_run_is_a_plain_module() -> None:
    net = forward(mlp(), 3)
    buffer = io.BytesIO()
    torch.save(net, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(net), torch.load(buffer, weights_only=False), copy.deepcopy(copy.deepcopy(net))):
        nn.init.zeros_(twin[-1].weight)
        nn.init.zeros_(twin[-1].bias)
        assert not twin(torch.randn(4, 6)).any()
        assert net(torch.randn(4, 6)).all()


# Inputs and outputs


class Talkative(nn.Module):
    """Takes and returns structures, and notes what each replica was given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, CLASSES)
        self.given: list[dict[str, Any]] = []

    def forward(self, batch: dict[str, Any], *, scale: float) -> dict[str, Any]:
        self.given.append(batch)
        logits = self.linear(batch["x"]) * scale
        return {"logits": logits, "names": [name.upper() for name in batch["names"]], "scale": scale, "none": None}


def test_a_batch_of_tensors_strings_and_lists_is_split_and_a_dict_is_returned() -> None:
    net = Talkative()
    table = torch.arange(9.0)
    names = list("abcde")
    batch = {"x": torch.randn(5, 6), "names": names, "ids": [[1], [2], [3], [4], [5]], "table": table, "kind": "digits"}
    expected = net(batch, scale=2.0)
    net.given.clear()
    output = forward(net, 2)(batch, scale=2.0)
    torch.testing.assert_close(output["logits"], expected["logits"])
    assert output["names"] == list("ABCDE")
    assert (output["scale"], output["none"]) == (2.0, None)
    assert [given["names"] for given in net.given] == [["a", "b", "c"], ["d", "e"]]
    assert [given["ids"] for given in net.given] == [[[1], [2], [3]], [[4], [5]]]
    assert all(given["kind"] == "digits" and torch.equal(given["table"], table) for given in net.given)


def test_a_module_that_returns_a_dict_trains_as_on_one_device() -> None:
    class Returning(Classifier):
        def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
            batch = batch | {"names": ["name"] * len(batch["x"])}
            return cross_entropy(self.net(batch, scale=0.5)["logits"], batch["label"])

    net = Talkative()
    expected = fitted(1, Returning(copy.deepcopy(net)))
    assert largest_difference(fitted(4, Returning(net)), expected) <= 1e-10


def test_a_call_without_a_batch_runs_on_one_device() -> None:
    class Generating(nn.Module):
        def forward(self, number: int) -> Tensor:
            return torch.arange(number)

    assert forward(Generating(), 4)(5).tolist() == [0, 1, 2, 3, 4]


def test_a_batch_smaller_than_the_devices_uses_fewer_replicas() -> None:
    Probe.seen.clear()
    fitted(16, Classifier(Probe()), [3, 1])
    assert [seen[0] for seen in Probe.seen] == [1, 1, 1, 1]


# Errors


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        if x.isnan().any():
            raise LookupError("no such thing")
        output: Tensor = self.linear(x)
        return output


@pytest.mark.parametrize("threaded", [False, True])
def test_an_error_in_a_replica_is_raised_with_its_traceback_and_place(threaded: bool) -> None:
    [batch] = batches([8])
    batch["x"][5] = torch.nan
    model = Classifier(Failing())
    before = dict(vars(model.net))
    with pytest.raises(LookupError, match="no such thing") as raised:
        trainer(4, DataParallelStrategy(threaded=threaded)).fit(model, DataLoader([batch], batch_size=None))  # type: ignore[arg-type]
    text = "".join(traceback.format_exception(raised.value))
    assert "in replica 2 of 4 of net, on cpu" in text
    assert 'raise LookupError("no such thing")' in text
    assert vars(model.net) == before  # forward is the class's again
    assert "forward" not in vars(model.net)


@pytest.mark.parametrize("run", ["fit", "validate", "test", "predict"])
def test_forward_is_parallel_during_a_run_and_restored_after_it(run: str) -> None:
    class Watching(Classifier):
        def on_any_start(self) -> None:
            watched.append(type(vars(self.net).get("forward")))

        on_train_start = on_validation_start = on_test_start = on_predict_start = on_any_start

    watched: list[type] = []
    model = Watching()
    parallel = trainer(2)
    for _ in range(2):  # a trainer is used more than once
        getattr(parallel, run)(model, loader([4]))
        parallel.fit_loop.max_epochs += 1
        assert "forward" not in vars(model.net)
    assert watched == [ParallelForward] * 2


def compiled(net: nn.Module) -> nn.Module:
    net.compile()
    return net


def with_own_forward(net: nn.Module) -> nn.Module:
    net[0].forward = net[0].forward
    return net


def sharded(net: nn.Module, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    class Sharded(Tensor):
        pass

    monkeypatch.setattr("project.strategies.single_process.DTensor", Sharded)
    net[0].weight = nn.Parameter(torch.ones(16, 6).as_subclass(Sharded))
    return net


@pytest.mark.parametrize(
    ("modules", "net", "says"),
    [
        (["nets"], mlp, r"names nets, .*\(it has net, loss, accuracy, f1\).*modules=\[net\]"),
        (["net.00"], mlp, r"names net.00.*modules=\[net.0\]"),
        (["backbone"], mlp, r"names backbone.*it has net.*modules=\[NAME\]"),
        ([], mlp, "modules is empty"),
        (["net", "net.0"], mlp, r"names net and net.0.*modules=\[net\]"),
        (["net.0", "net"], mlp, r"names net.0 and net,.*modules=\[net\]"),
        (["net"], lambda: nn.SyncBatchNorm(6), "can't synchronise batch norm.*net asks for it.*strategy=ddp"),
        (["net"], lambda: compiled(mlp()), "torch.compile.*net, can't follow: type model.compile=false"),
        (["net.0"], lambda: compiled(mlp()), "replicas of net.0 .*model.compile=false"),
        (["net"], lambda: nn.Sequential(compiled(mlp())), "compiled net.0, can't"),
        (["net"], lambda: nn.Sequential(torch.compile(mlp())), "compiled net.0, can't"),
        (["net"], lambda: with_own_forward(mlp()), "net.0 has a forward that was set on the instance"),
    ],
)
def test_a_model_that_cannot_be_replicated_is_refused(
    modules: list[str], net: Callable[[], nn.Module], says: str
) -> None:
    model = Classifier(net())
    with pytest.raises(UserError, match=says):
        fitted(2, model, strategy=DataParallelStrategy(modules))
    assert not isinstance(vars(model.net).get("forward"), ParallelForward)


def test_sharded_parameters_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Classifier(sharded(mlp(), monkeypatch))
    with pytest.raises(UserError, match=r"net.0.weight is sharded.*strategy=fsdp"):
        fitted(2, model)


def test_torch_compile_beside_the_parallel_module_is_allowed() -> None:
    model = Classifier()
    model.head = compiled(nn.Linear(1, 1))
    fitted(2, model, [4])


def test_several_hosts_ranks_and_other_accelerators_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"num_nodes=2: type trainer/strategy=ddp"):
        trainer(2, num_nodes=2)
    with pytest.raises(UserError, match=r"sync_batchnorm=true asks for it"):
        trainer(2, sync_batchnorm=True)
    with monkeypatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        with pytest.raises(UserError, match="WORLD_SIZE=2: .*without torchrun"):
            trainer(2)
    with monkeypatch.context() as patch:
        patch.setenv("SLURM_NTASKS", "4")
        patch.setenv("SLURM_NTASKS_PER_NODE", "2")
        with pytest.raises(UserError, match="WORLD_SIZE=4"):
            trainer(2, plugins=[SLURMEnvironment(auto_requeue=False)])
    strategy = DataParallelStrategy()
    strategy.accelerator = type("MPSAccelerator", (), {})()
    with pytest.raises(UserError, match="not on MPSAccelerator: type trainer.accelerator=cpu"):
        strategy._configure_launcher()
