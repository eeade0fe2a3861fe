"""Where the strategy layer_split has weights, activations, hooks and the optimizer's states."""

import copy
from typing import Any

import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from layer_split_training import Structured, Summed, connected, fitted, places, staged
from project.strategies.layer_split import LayerSplitStrategy, StagedForward
from small_classifier import Classifier, loader, mlp, quiet_trainer

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


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


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_structures_and_keywords_pass_from_device_to_device(micro_batches: int) -> None:
    devices = [torch.device("cpu", index) for index in range(2)]
    net = staged(nn.Sequential(Structured(), Summed()), devices, micro_batches)
    x, scale = torch.randn(4, 2), torch.full((4, 1), 3.0)
    outputs = net(placed(x, devices[0]), scale=placed(scale, devices[0]))
    assert [output.place for output in outputs] == [devices[0]] * 2
    torch.testing.assert_close([output.as_subclass(Tensor) for output in outputs], [x * 3 + 1, x * 9])


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
