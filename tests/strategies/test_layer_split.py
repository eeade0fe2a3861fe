"""The strategy layer_split: the same experiment as on one device, each part on its device, or a sentence."""

import copy
import functools
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from layer_split_training import Structured, Summed, connected, fitted, places, staged
from project.config.composition import config_folder, register_resolvers
from project.config.strategy_names import resolve
from project.errors import UserError
from project.models.nets import GPT, MLP, ResidualCNN, ViT
from project.strategies import is_single_process
from project.strategies.layer_split import LayerSplitStrategy, StagedForward
from small_classifier import UNEVEN, VALIDATION, Classifier, batches, largest_difference, loader, mlp, quiet_trainer

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


# The same experiment


@functools.cache
def on_one_device(optimizer: str) -> tuple[Classifier, dict[str, float]]:
    torch.manual_seed(0)
    model = Classifier(optimizer=optimizer)
    plain = quiet_trainer(1, "auto")
    plain.fit(model, loader(UNEVEN), loader(VALIDATION, seed=1))
    return model, {name: float(value) for name, value in plain.callback_metrics.items()}


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_training_equals_one_device(devices: int, optimizer: str, micro_batches: int) -> None:
    expected, expected_metrics = on_one_device(optimizer)
    torch.manual_seed(0)
    model = Classifier(optimizer=optimizer)
    trainer = quiet_trainer(devices, LayerSplitStrategy(micro_batches=micro_batches))
    trainer.fit(model, loader(UNEVEN), loader(VALIDATION, seed=1))
    assert trainer.global_step == 20
    assert largest_difference(model, expected) <= 1e-10
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert metrics == pytest.approx(expected_metrics, abs=1e-12, rel=0)


@pytest.mark.parametrize("arguments", [{"accumulate_grad_batches": 4}, {"gradient_clip_val": 0.05}])
def test_accumulation_and_clipping_equal_one_device(arguments: dict[str, Any]) -> None:
    net = mlp()
    expected = fitted(Classifier(copy.deepcopy(net)), 1, **arguments)
    assert largest_difference(fitted(Classifier(copy.deepcopy(net)), 3, **arguments), expected) <= 1e-10
    assert largest_difference(fitted(Classifier(copy.deepcopy(net)), 1), expected) > 1e-4


def test_dropout_with_one_micro_batch_is_that_of_one_device() -> None:
    net, models = mlp(dropout=0.5), []
    for devices in (1, 3):
        torch.manual_seed(3)
        models.append(fitted(Classifier(copy.deepcopy(net)), devices))
    assert largest_difference(*models) == 0.0


IMAGES = torch.linspace(-1, 1, 5 * 64, dtype=torch.float64).reshape(5, 1, 8, 8)
NETS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "mlp": (lambda: MLP([1, 8, 8], 10, width=16, depth=2), IMAGES),
    "cnn": (lambda: ResidualCNN([1, 8, 8], 10, width=4, blocks=2).eval(), IMAGES),
    "vit": (lambda: ViT([1, 8, 8], 10, width=16, depth=2, heads=2), IMAGES),
    "gpt": (lambda: GPT(50, 8, width=16, depth=2, heads=2, tie_weights=False), torch.arange(40).reshape(5, 8)),
    "gpt_checkpointed": (
        lambda: GPT(50, 8, width=16, depth=2, heads=2, tie_weights=False, checkpoint_activations=True),
        torch.arange(40).reshape(5, 8),
    ),
}


@pytest.mark.parametrize("micro_batches", [1, 2, 8])
@pytest.mark.parametrize("name", NETS)
def test_output_and_gradients_of_every_net_are_those_of_its_own_forward(name: str, micro_batches: int) -> None:
    make, inputs = NETS[name]
    plain = make().double()
    net = staged(copy.deepcopy(plain), [CPU] * 3, micro_batches)
    outputs = [module(inputs) for module in (net, plain)]
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-12)
    for output in outputs:
        output.square().mean().backward()
    for actual, expected in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_batch_norm_normalizes_each_micro_batch(micro_batches: int) -> None:
    x = torch.randn(6, 4)
    net = staged(nn.Sequential(nn.BatchNorm1d(4), nn.Identity()), [CPU] * 2, micro_batches)
    norm = nn.BatchNorm1d(4)
    torch.testing.assert_close(net(x), torch.cat([norm(part) for part in x.chunk(micro_batches)]))
    assert net[0].num_batches_tracked == micro_batches
    torch.testing.assert_close(net[0].running_mean, norm.running_mean)


def test_two_modules_are_split_each_over_all_devices() -> None:
    class Two(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleDict({"encoder": nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))})

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            return cross_entropy(self.net(self.parts["encoder"](batch["x"])), batch["label"])

    model = Two()
    expected = fitted(copy.deepcopy(model), 1)
    assert largest_difference(fitted(model, 2, strategy=LayerSplitStrategy(["net", "parts.encoder"])), expected) == 0


# Errors


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise LookupError("no such thing")


def test_an_error_in_a_part_tells_the_stage() -> None:
    model = Classifier(nn.Sequential(nn.Linear(6, 3), Failing()))
    with pytest.raises(LookupError) as raised:
        fitted(model, 2, [4])
    assert "in stage 1 of 2 of net, on cpu" in "".join(traceback.format_exception(raised.value))
    assert "forward" not in vars(model.net)


def compiled(net: nn.Module) -> nn.Module:
    net.compile()
    return net


def with_own_forward(net: nn.Module) -> nn.Module:
    net.forward = net.forward
    return net


def recurring() -> nn.Module:
    layer = nn.Linear(6, 6)
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(6, 6), layer)


@pytest.mark.parametrize(
    ("net", "arguments", "says"),
    [
        (
            mlp,
            {"modules": ["nets"]},
            r"names nets, .*strategy=layer_split trainer.strategy.modules=\[net\]",
        ),
        (lambda: nn.Linear(6, 3), {}, "Linear can't be cut into stages, .*parallel_plan with a chain"),
        (lambda: nn.Sequential(nn.Linear(6, 3)), {}, "has 1 parts .*type trainer.devices=1"),
        (mlp, {"boundaries": ["head"]}, "boundaries names head, which is not among"),
        (mlp, {"boundaries": ["1", "2"]}, "into 2 stages: name the 1 parts"),
        (lambda: GPT(50, 8, width=16, depth=1, heads=2), {}, "type model.net.tie_weights=false"),
        (recurring, {}, "net.0.weight and net.3.weight are one tensor, and stages 0 and 1"),
        (lambda: nn.Sequential(nn.SyncBatchNorm(6), nn.ReLU()), {}, "can't synchronise batch norm, and net.0 asks"),
        (lambda: compiled(mlp()), {}, "torch.compile, which compiled net, .*: type model.compile=false"),
        (lambda: with_own_forward(mlp()), {}, "the parts of net in place of its forward, which here was set"),
    ],
)
def test_a_model_that_cannot_be_split_is_refused_and_left_as_it_is(
    net: Callable[[], nn.Module], arguments: dict[str, Any], says: str
) -> None:
    model = Classifier(net())
    names = list(model.state_dict())
    with pytest.raises(UserError, match=says):
        fitted(model, 2, strategy=LayerSplitStrategy(**arguments))
    assert list(model.state_dict()) == names
    assert not isinstance(vars(model.net).get("forward"), StagedForward)


def test_weights_shared_with_the_rest_of_the_model_are_refused_unless_in_the_first_stage() -> None:
    model = Classifier()
    model.also = model.net[0]
    connected(model, [CPU, META]).model_to_device()
    model = Classifier()
    model.also = model.net[5]
    with pytest.raises(UserError, match=r"also.weight and net.5.weight are one tensor"):
        connected(model, [CPU, META]).model_to_device()
    assert set(places(model).values()) == {"cpu"}
    assert all(part is not None for part in model.net)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"micro_batches": 0}, "micro_batches=0 can't be"),
        ({"micro_batches": "auto"}, "micro_batches=auto can't be"),
        ({"modules": ["a", "b"], "boundaries": ["1"]}, "boundaries=null"),
    ],
)
def test_impossible_arguments_are_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        LayerSplitStrategy(**arguments)


def test_several_hosts_and_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"layer_split is one process.*num_nodes=2: type trainer/strategy=fsdp"):
        quiet_trainer(2, LayerSplitStrategy(), num_nodes=2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="WORLD_SIZE=2: .*without torchrun"):
        quiet_trainer(2, LayerSplitStrategy())


def test_a_step_that_does_not_call_the_module_is_refused() -> None:
    class Around(Classifier):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            return self.net[0](batch["x"]).sum()

    with pytest.raises(UserError, match="training step of Around did not call it.*strategy=fsdp"):
        fitted(Around(), 2, [4])


def test_compiled_parts_are_called_compiled() -> None:
    called: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            called.append("compiled")
            return graph.forward(*args)

        return run

    net = nn.Sequential(Structured(), Summed())
    net[1].compile(backend=backend)
    x = torch.randn(4, 2)
    output, _ = staged(net, [CPU] * 2)(x, scale=torch.ones(4, 1))
    torch.testing.assert_close(output, x + 1)
    assert called == ["compiled"]


# Checkpoints, predictions, configs


@pytest.mark.parametrize(("saved_with", "loaded_with"), [(3, 1), (1, 3), (2, 4)])
def test_checkpoints_are_those_of_one_device(saved_with: int, loaded_with: int, tmp_path: Path) -> None:
    def split_over(devices: int, **arguments: Any) -> L.Trainer:
        return quiet_trainer(devices, LayerSplitStrategy(), **arguments)

    net = mlp().double()  # Lightning reads weights before it converts the model to the trainer's precision
    path, plain_path = tmp_path / "model.ckpt", tmp_path / "plain.ckpt"
    saving = split_over(saved_with)
    saving.fit(Classifier(copy.deepcopy(net), "AdamW"), loader(UNEVEN))
    saving.save_checkpoint(path)
    plain = fitted(Classifier(copy.deepcopy(net), "AdamW"), 1)
    plain.trainer.save_checkpoint(plain_path)
    assert list(torch.load(path, weights_only=True)["state_dict"]) == list(plain.state_dict())

    expected = saving.validate(saving.model, loader(VALIDATION), verbose=False)
    model = Classifier(copy.deepcopy(net), "AdamW")
    loading = split_over(loaded_with, max_epochs=2)
    again = loading.validate(model, loader(VALIDATION), ckpt_path=path, verbose=False)
    assert again[0] == pytest.approx(expected[0], abs=1e-12)
    loading.fit(model, loader(UNEVEN, seed=2), ckpt_path=path)
    quiet_trainer(1, "auto", max_epochs=2).fit(plain, loader(UNEVEN, seed=2), ckpt_path=plain_path)
    assert largest_difference(model, plain) <= 1e-10


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_predictions_come_in_the_order_of_the_samples(micro_batches: int) -> None:
    model = Classifier()
    expected = quiet_trainer(1, "auto").predict(model, loader([5, 8]))
    actual = quiet_trainer(3, LayerSplitStrategy(micro_batches=micro_batches)).predict(model, loader([5, 8]))
    torch.testing.assert_close(actual, expected)


def test_both_spellings_of_the_config_build_the_strategy() -> None:
    register_resolvers()
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        as_group = compose("train", ["trainer/strategy=layer_split", "trainer.devices=4"]).trainer.strategy
        as_name = compose("train", ["trainer.strategy=layer_split"]).trainer.strategy
    assert resolve(as_name) == as_group
    assert is_single_process(resolve(as_name))
    strategy = instantiate(as_group, _convert_="all")
    assert isinstance(strategy, LayerSplitStrategy)
    assert (strategy.modules, strategy.micro_batches, strategy.boundaries) == (["net"], 1, None)


# CUDA


@pytest.mark.gpu
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_stages_on_the_cpu_and_a_gpu_give_the_gradients_of_the_cpu(micro_batches: int) -> None:
    gpu = torch.device("cuda", 0)
    [batch] = batches([8])
    plain = mlp().double()
    net = staged(copy.deepcopy(plain), [gpu, CPU, gpu], micro_batches)
    output = net(batch["x"].to(gpu))
    assert output.device == gpu
    output.square().sum().backward()
    plain(batch["x"]).square().sum().backward()
    for actual, expected in zip(net.parameters(), plain.parameters(), strict=True):
        assert actual.grad is not None
        torch.testing.assert_close(actual.grad.cpu(), expected.grad, rtol=0, atol=1e-10)


@pytest.mark.gpu
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_training_on_gpus_equals_one_gpu(optimizer: str, micro_batches: int) -> None:
    # With one GPU all stages are on it, and nothing moves.
    devices = [torch.device("cuda", i % torch.cuda.device_count()) for i in range(3)]
    net = mlp()
    expected, model = Classifier(copy.deepcopy(net), optimizer), Classifier(copy.deepcopy(net), optimizer)
    clipped = {"accelerator": "cuda", "gradient_clip_val": 0.05}
    quiet_trainer(1, "auto", **clipped).fit(expected, loader(UNEVEN))
    strategy = LayerSplitStrategy(parallel_devices=devices, micro_batches=micro_batches)
    quiet_trainer("auto", strategy, **clipped).fit(model, loader(UNEVEN))  # type: ignore[arg-type]
    assert largest_difference(model, expected) <= 1e-10
