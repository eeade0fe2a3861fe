"""The strategy layer_split: the same experiment as on one device, each part on its device, or a sentence."""

import copy
import functools
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_leaves

from project.errors import UserError
from project.launch.composition import config_folder, register_resolvers
from project.launch.strategy import resolve
from project.models.nets import GPT, MLP, ResidualCNN, ViT
from project.strategies import is_single_process
from project.strategies.layer_split import LayerSplitStrategy, StagedForward
from project.strategies.stages import chain_of, split
from small_classifier import UNEVEN, VALIDATION, Classifier, batches, largest_difference, loader, mlp, quiet_trainer

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def fitted(
    model: L.LightningModule, devices: int, sizes: list[int] = UNEVEN, strategy: Any = None, **arguments: Any
) -> L.LightningModule:
    strategy = strategy or ("auto" if devices == 1 else LayerSplitStrategy())
    quiet_trainer(devices, strategy, **arguments).fit(model, loader(sizes))
    return model


def staged(net: nn.Module, devices: Sequence[torch.device], micro_batches: int = 1) -> nn.Module:
    """The net as the strategy leaves it during a run."""
    stages = split(chain_of(net), len(devices))
    for device, stage in zip(devices, stages, strict=True):
        for _, part in stage:
            part.to(device)
    net.__dict__["forward"] = StagedForward(net, "net", stages, devices, micro_batches)
    return net


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


# Where things are


class Placed(Tensor):
    """On the CPU, but it remembers to which device it was moved, and can't be used with one that is elsewhere."""

    place: torch.device

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        places = {leaf.place for leaf in tree_leaves(args) if isinstance(leaf, cls) and hasattr(leaf, "place")}
        if len(places) > 1:
            raise RuntimeError(f"expected all tensors to be on the same device, but found {places}")
        result = super().__torch_function__(func, types, args, kwargs or {})
        if func is Tensor.to:
            result, places = placed(result, args[1]), {args[1]}
        for leaf in tree_leaves(result) if places else ():
            if isinstance(leaf, cls):
                leaf.place = next(iter(places))
        return result


def placed(tensor: Tensor, device: torch.device) -> Tensor:
    copied = tensor.clone().as_subclass(Placed)
    copied.place = device
    return copied


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_each_part_gets_activations_on_its_device_and_the_output_comes_back_to_the_first(micro_batches: int) -> None:
    devices = [torch.device("cpu", index) for index in range(3)]
    net = staged(mlp(), devices, micro_batches)
    found: list[tuple[str, torch.device]] = []
    for name, part in net.named_children():
        part.register_forward_pre_hook(lambda part, args, name=name: found.append((name, args[0].place)))
    output = net(placed(torch.randn(4, 6), devices[0]))
    assert output.place == devices[0]
    stages = net.__dict__["forward"].stages
    assert [len(stage) for _, stage in stages] == [2, 3, 1]
    assert found == [(name, device) for device, stage in stages for name, _ in stage] * micro_batches


class Structured(nn.Module):
    def forward(self, x: Tensor, *, scale: Tensor) -> dict[str, Tensor]:
        return {"x": x * scale, "scale": scale}


class Summed(nn.Module):
    def forward(self, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return given["x"] + 1, given["x"] * given["scale"]


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_structures_and_keywords_pass_from_device_to_device(micro_batches: int) -> None:
    devices = [torch.device("cpu", index) for index in range(2)]
    net = staged(nn.Sequential(Structured(), Summed()), devices, micro_batches)
    x, scale = torch.randn(4, 2), torch.full((4, 1), 3.0)
    outputs = net(placed(x, devices[0]), scale=placed(scale, devices[0]))
    assert [output.place for output in outputs] == [devices[0]] * 2
    torch.testing.assert_close([output.as_subclass(Tensor) for output in outputs], [x * 3 + 1, x * 9])


def connected(model: L.LightningModule, devices: list[torch.device], **arguments: Any) -> LayerSplitStrategy:
    strategy = LayerSplitStrategy(parallel_devices=devices, **arguments)
    strategy.connect(model)
    return strategy


def places(model: nn.Module) -> dict[str, str]:
    return {name: tensor.device.type for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    ("boundaries", "elsewhere"), [(None, ("4", "5")), (["5"], ("5",)), ("1", ("1", "2", "3", "4", "5"))]
)
def test_weights_of_each_stage_are_on_its_device_and_all_else_on_the_first(
    boundaries: Any, elsewhere: tuple[str, ...]
) -> None:
    model = Classifier()
    model.head = nn.Linear(2, 2)
    names = list(model.state_dict())
    connected(model, [CPU, META], boundaries=boundaries).model_to_device()
    assert places(model) == {
        name: "meta" if name.startswith(tuple(f"net.{part}." for part in elsewhere)) else "cpu" for name in names
    }
    assert list(model.state_dict()) == names
    assert model.device == CPU


class Steady(Classifier):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(self.parameters())  # which has states from the start


def test_states_of_the_optimizer_are_beside_their_weights_also_those_of_a_checkpoint() -> None:
    trained = fitted(Steady(), 1)
    states = [trained.optimizers(use_pl_optimizer=False).state_dict()]  # type: ignore[union-attr]
    trainer = quiet_trainer("auto", LayerSplitStrategy(parallel_devices=[CPU, META]))  # type: ignore[arg-type]
    model = Steady()
    trainer.state.fn = TrainerFn.FITTING
    trainer.strategy.connect(model)
    model.trainer = trainer
    trainer.strategy.setup(trainer)
    for load in (False, True):
        if load:
            trainer.strategy.load_optimizer_state_dict({"optimizer_states": states})
        state = trainer.optimizers[0].state
        assert {parameter.device.type for parameter in state} == {"cpu", "meta"}
        assert all(value["sum"].device == parameter.device for parameter, value in state.items())


def test_modules_of_configure_model_are_made_on_the_cpu() -> None:
    with connected(Classifier(), [META, META]).tensor_init_context():
        assert torch.ones(1).device == CPU


def test_hooks_of_the_module_see_the_full_batch_and_those_of_parts_each_micro_batch() -> None:
    net = staged(mlp(), [CPU] * 2, micro_batches=3)
    whole, inner = [], []
    net.register_forward_hook(lambda module, args, output: whole.append(len(output)))
    net[4].register_forward_hook(lambda module, args, output: inner.append(len(output)))
    net(torch.randn(8, 6))
    assert (whole, inner) == ([8], [3, 3, 2])


def test_a_copy_made_during_a_run_is_a_plain_module() -> None:
    net = staged(mlp(), [CPU] * 2)
    twin = copy.deepcopy(net)
    nn.init.zeros_(twin[-1].weight)
    nn.init.zeros_(twin[-1].bias)
    assert not twin(torch.randn(4, 6)).any()
    assert net(torch.randn(4, 6)).all()


@pytest.mark.parametrize("run", ["fit", "validate", "test", "predict"])
def test_parts_are_called_during_a_run_and_forward_is_restored_after_it(run: str) -> None:
    class Watching(Classifier):
        def on_any_start(self) -> None:
            watched.append(type(vars(self.net).get("forward")))

        on_train_start = on_validation_start = on_test_start = on_predict_start = on_any_start

    watched: list[type] = []
    model = Watching()
    trainer = quiet_trainer(2, LayerSplitStrategy())
    for _ in range(2):  # a trainer is used more than once
        getattr(trainer, run)(model, loader([4]))
        trainer.fit_loop.max_epochs += 1
        assert "forward" not in vars(model.net)
    assert watched == [StagedForward] * 2


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
