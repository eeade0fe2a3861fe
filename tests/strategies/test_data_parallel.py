"""The strategy dp: the same experiment as on one device, and a sentence where that can't be."""

import contextlib
import copy
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from lightning.pytorch.strategies import StrategyRegistry
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

from data_parallel_training import Counting, fitted, forward, trainer
from project.config.composition import config_folder, register_resolvers
from project.models.nets import MLP
from project.strategies import is_single_process
from project.strategies.batches import gather, share
from project.strategies.data_parallel import DataParallelStrategy, ParallelForward
from project.strategies.random_state import random_state, set_random_state
from small_classifier import (
    CLASSES,
    UNEVEN,
    VALIDATION,
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


# The same experiment


@functools.cache
def on_one_device(optimizer: str) -> tuple[Classifier, dict[str, float]]:
    torch.manual_seed(0)
    model = Classifier(optimizer=optimizer)
    plain = trainer()
    plain.fit(model, loader(UNEVEN), loader(VALIDATION, seed=1))
    return model, {name: float(value) for name, value in plain.callback_metrics.items()}


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("devices", [2, 3, 4, 16])
@pytest.mark.parametrize("threaded", [False, True])
def test_training_equals_one_device(devices: int, optimizer: str, threaded: bool) -> None:
    expected, expected_metrics = on_one_device(optimizer)
    torch.manual_seed(0)
    model = Classifier(optimizer=optimizer)
    parallel = trainer(devices, DataParallelStrategy(threaded=threaded))
    parallel.fit(model, loader(UNEVEN), loader(VALIDATION, seed=1))
    assert parallel.global_step == 20
    assert largest_difference(model, expected) <= 1e-10
    metrics = {name: float(value) for name, value in parallel.callback_metrics.items()}
    assert metrics == pytest.approx(expected_metrics, abs=1e-12, rel=0)
    # The weights differ by class, so a mean over replicas of their weighted means would be another number.
    assert model.losses == pytest.approx(expected.losses, abs=1e-12, rel=0)


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize(
    "arguments", [{"accumulate_grad_batches": 4}, {"gradient_clip_val": 0.05}, {"accumulate_grad_batches": 3}]
)
def test_accumulation_and_clipping_equal_one_device(devices: int, arguments: dict[str, Any]) -> None:
    net = mlp()
    expected = fitted(1, Classifier(copy.deepcopy(net)), **arguments)
    assert largest_difference(fitted(devices, Classifier(copy.deepcopy(net)), **arguments), expected) <= 1e-10
    assert largest_difference(fitted(1, Classifier(copy.deepcopy(net))), expected) > 1e-4


def test_accumulated_small_batches_equal_one_large_batch() -> None:
    class Unweighted(Classifier):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            return cross_entropy(self.net(batch["x"]), batch["label"])

    net = mlp()
    [large] = batches([64])
    small = [{name: tensor[start : start + 16] for name, tensor in large.items()} for start in range(0, 64, 16)]
    models = []
    for parts, accumulate in ((small, 4), ([large], 1)):
        models.append(Unweighted(copy.deepcopy(net)))
        trainer(3, accumulate_grad_batches=accumulate).fit(models[-1], DataLoader(parts, batch_size=None))
    assert largest_difference(*models) <= 1e-10


class Adversarial(L.LightningModule):
    """Two optimizers, stepped by hand, over two parallel modules."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6))
        self.parts = nn.ModuleDict({"discriminator": nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))})

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        generator, discriminator = self.optimizers()
        fake = self.generator(batch["x"][:, :4])
        self.toggle_optimizer(discriminator)
        judged = self.parts["discriminator"]
        self.manual_backward(judged(fake.detach()).exp().mean() - judged(batch["x"]).mean())
        discriminator.step()
        discriminator.zero_grad()
        self.untoggle_optimizer(discriminator)
        self.toggle_optimizer(generator)
        self.manual_backward(-judged(fake).mean())
        generator.step()
        generator.zero_grad()
        self.untoggle_optimizer(generator)

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[Any]]:
        parts = (self.generator, self.parts)
        return [torch.optim.SGD(part.parameters(), lr=0.05) for part in parts], []


def test_manual_optimization_with_two_optimizers_equals_one_device() -> None:
    model = Adversarial()
    expected = fitted(1, copy.deepcopy(model))
    strategy = DataParallelStrategy(["generator", "parts.discriminator"])
    assert largest_difference(fitted(3, model, strategy=strategy), expected) <= 1e-10


def test_tied_weights_and_recurrent_nets_equal_one_device() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 6)
            self.again = nn.Linear(6, 6)
            self.again.weight = self.first.weight
            self.shared = nn.ModuleList([self.first, self.again])
            self.lstm = nn.LSTM(6, CLASSES, batch_first=True)
            self.scales = nn.ParameterList([torch.ones(6), torch.full((6,), 2.0)])

        def forward(self, x: Tensor) -> Tensor:
            for layer, scale in zip(self.shared, self.scales, strict=True):
                x = layer(x) * scale
            output: Tensor = self.lstm(x[:, None].expand(-1, 5, -1))[0]
            return output[:, -1]

    net = Tied()
    expected = fitted(1, Classifier(copy.deepcopy(net)))
    assert largest_difference(fitted(4, Classifier(net)), expected) <= 1e-10


# Lightning, checkpoints, configs


def test_lightning_sees_one_rank() -> None:
    parallel = trainer(4)
    assert parallel.strategy.root_device == CPU
    assert parallel.strategy.launcher is None
    assert (parallel.world_size, parallel.global_rank, parallel.local_rank, parallel.node_rank) == (1, 0, 0, 0)
    assert parallel.is_global_zero
    assert parallel.num_devices == 4
    assert parallel.strategy.distributed_sampler_kwargs == {"num_replicas": 1, "rank": 0}
    assert not parallel._accelerator_connector.is_distributed


def test_the_loader_keeps_its_sampler_and_is_read_once() -> None:
    class Reading(Classifier):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:  # type: ignore[override]
            rows.extend(batch[:, 0].int().tolist())
            return self.net(batch).sum()

    rows: list[int] = []
    data = torch.arange(10.0)[:, None].expand(-1, 6)
    parallel = trainer(4)
    parallel.fit(Reading(), DataLoader(data, batch_size=3))  # type: ignore[arg-type]
    assert rows == list(range(10))
    assert not isinstance(parallel.train_dataloader.sampler, DistributedSampler)


@pytest.mark.parametrize("spelled", ["dp", "DP"])
def test_the_name_dp_is_registered_once(spelled: str) -> None:
    DataParallelStrategy.register()
    DataParallelStrategy.register()
    assert StrategyRegistry.available_strategies().count("dp") == 1
    model = fitted(3, Classifier(), strategy=spelled)
    assert isinstance(model.trainer.strategy, DataParallelStrategy)


def test_the_config_builds_the_strategy() -> None:
    register_resolvers()
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        config = compose("train", ["trainer/strategy=dp", "trainer.devices=4", "trainer.accelerator=cpu"])
        bare = compose("train", ["trainer.strategy=dp"])
    strategy = instantiate(config.trainer.strategy, _convert_="all")
    assert isinstance(strategy, DataParallelStrategy)
    assert strategy.modules == ["net"]
    assert DataParallelStrategy("net").modules == ["net"]
    plain = {"_target_": config.trainer.strategy._target_, "modules": ["net"]}
    assert is_single_process(plain)
    assert is_single_process(bare.trainer.strategy)
    assert is_single_process("DP")
    assert not any(is_single_process(other) for other in ("auto", "ddp", {"_target_": "x.Y"}, None))


@pytest.mark.parametrize(("saved_with", "loaded_with"), [(3, 1), (1, 3), (2, 4)])
def test_checkpoints_are_those_of_one_device(saved_with: int, loaded_with: int, tmp_path: Path) -> None:
    net = mlp().double()  # Lightning reads weights before it converts the model to the trainer's precision
    first, second = loader(UNEVEN), loader(UNEVEN, seed=2)
    path = tmp_path / "model.ckpt"
    saving = trainer(saved_with)
    saving.fit(Classifier(copy.deepcopy(net), "AdamW"), first)
    saving.save_checkpoint(path)
    stored = torch.load(path, weights_only=True)
    plain = Classifier(copy.deepcopy(net), "AdamW")
    assert list(stored["state_dict"]) == list(plain.state_dict())

    # Evaluated, and trained further with the optimizer's state, on the other.
    expected = trainer(saved_with).validate(saving.model, loader(VALIDATION), verbose=False)
    model = Classifier(copy.deepcopy(net), "AdamW")
    loading = trainer(loaded_with, max_epochs=2)
    assert loading.validate(model, loader(VALIDATION), ckpt_path=path, verbose=False)[0] == pytest.approx(
        expected[0], abs=1e-12
    )
    loading.fit(model, second, ckpt_path=path)
    trainer().fit(plain, first)
    resumed = trainer(max_epochs=2)
    plain_path = tmp_path / "plain.ckpt"
    plain.trainer.save_checkpoint(plain_path)
    resumed.fit(plain, second, ckpt_path=plain_path)
    assert largest_difference(model, plain) <= 1e-10


def test_predictions_come_in_the_order_of_the_samples() -> None:
    model = Classifier()
    expected = trainer().predict(model, loader([5, 8]))
    assert expected is not None
    for actual, wanted in zip(trainer(3).predict(model, loader([5, 8])), expected, strict=True):  # type: ignore[arg-type]
        torch.testing.assert_close(actual, wanted)


# CUDA


class Generators:
    """Those of CUDA devices, which know their seed alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
        self.seeds = [torch.initial_seed()] * number
        self.current = 0
        monkeypatch.setattr(torch.cuda, "device", self.device)
        monkeypatch.setattr(torch.cuda, "initial_seed", lambda: self.seeds[self.current])
        monkeypatch.setattr(torch.cuda, "manual_seed", self.set_seed)
        monkeypatch.setattr(torch.cuda, "manual_seed_all", self.set_all)
        monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: torch.tensor(self.seeds[device.index]))
        monkeypatch.setattr(torch.cuda, "set_rng_state", self.set_state)

    @contextlib.contextmanager
    def device(self, which: torch.device) -> Iterator[None]:
        self.current = which.index
        yield

    def set_seed(self, seed: int) -> None:
        self.seeds[self.current] = seed

    def set_all(self, seed: int) -> None:
        self.seeds = [seed] * len(self.seeds)

    def set_state(self, state: Tensor, device: torch.device) -> None:
        self.seeds[device.index] = int(state)


GPUS = [torch.device("cuda", index) for index in range(3)]


def test_each_gpu_draws_random_numbers_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    generators = Generators(monkeypatch, 3)
    DataParallelStrategy(parallel_devices=GPUS).on_train_start()
    assert generators.seeds == [0, 1_000_003, 2_000_006]  # device 0 keeps the run's seed


def test_a_run_that_goes_on_draws_on_each_gpu_what_it_would_have_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    generators = Generators(monkeypatch, 3)
    generators.seeds = [5, 6, 7]  # wherever they had come to
    state = random_state(*GPUS)
    torch.manual_seed(9)
    set_random_state(state, *GPUS)
    DataParallelStrategy(parallel_devices=GPUS).on_train_start()
    assert generators.seeds == [5, 6, 7]


def test_gpus_that_were_not_there_before_draw_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    generators = Generators(monkeypatch, 3)
    set_random_state(random_state(GPUS[0]), *GPUS)
    generators.seeds = [5, 9, 9]
    DataParallelStrategy(parallel_devices=GPUS).on_train_start()
    assert len(set(generators.seeds)) == 3


def test_random_numbers_of_a_gpu_mean_nothing_to_a_cpu() -> None:
    state = random_state(CPU)
    expected = torch.rand(3)
    set_random_state((state[0], [torch.zeros(16, dtype=torch.uint8)], *state[2:]), CPU)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("threaded", [False, True])
def test_replicas_made_by_torch_for_cuda_give_the_same_gradients_and_buffers(
    threaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's path without CUDA: real replicas and threads, but all tensors stay on the CPU."""

    def broadcast(tensors: list[Tensor], devices: list[int], detach: bool = False) -> list[list[Tensor]]:
        detached.append(detach)
        if not detach:
            return [[tensor * 1.0 for tensor in tensors] for _ in devices]
        return [tensors if index == 0 else [tensor.detach().clone() for tensor in tensors] for index in devices]

    detached: list[bool] = []
    monkeypatch.setattr(sys.modules["torch.nn.parallel.replicate"], "_broadcast_coalesced_reshape", broadcast)
    module = "project.strategies.data_parallel"
    monkeypatch.setattr(f"{module}._placed", lambda device: contextlib.nullcontext)
    monkeypatch.setattr(f"{module}.share", lambda value, batch, rows, device: share(value, batch, rows, CPU))
    monkeypatch.setattr(f"{module}.gather", lambda outputs, lengths, device, name: gather(outputs, lengths, CPU, name))

    net = Counting()
    net.norm = nn.Identity()  # type: ignore[assignment]
    plain = copy.deepcopy(net)
    devices = [torch.device("cuda", index) for index in range(3)]
    net.__dict__["forward"] = ParallelForward(net, "net", devices, threaded)
    x = torch.randn(8, 6)
    net(x).square().sum().backward()
    plain(x).square().sum().backward()
    torch.testing.assert_close(net.linear.weight.grad, plain.linear.weight.grad)
    assert (net.in_place, net.replaced) == (3, 3)
    assert detached == [False, False, True]  # parameters, buffers with gradients, buffers
    detached.clear()
    with torch.no_grad():
        torch.testing.assert_close(net(x), plain(x))
    assert detached == [True, True, True]


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_training_on_gpus_equals_one_gpu(optimizer: str) -> None:
    # With one GPU both replicas are on it: scatter, replicate, threads, streams and gather run all the same.
    devices = [torch.device("cuda", i % torch.cuda.device_count()) for i in range(3)]
    net = mlp()
    expected, model = Classifier(copy.deepcopy(net), optimizer), Classifier(copy.deepcopy(net), optimizer)
    trainer(1, accelerator="cuda").fit(expected, loader(UNEVEN))
    strategy = DataParallelStrategy(parallel_devices=devices)
    trainer("auto", strategy, accelerator="cuda").fit(model, loader(UNEVEN))  # type: ignore[arg-type]
    assert largest_difference(model, expected) <= 1e-10


@pytest.mark.gpu
def test_gpu_threads_carry_modes_and_errors() -> None:
    class Modes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, CLASSES)

        def forward(self, x: Tensor) -> tuple[Tensor, bool, bool, bool]:
            if x.isnan().any():
                raise LookupError("no such thing")
            assert x.device == self.linear.weight.device
            return self.linear(x), torch.is_autocast_enabled("cuda"), torch.is_grad_enabled(), x.is_inference()

    devices = [torch.device("cuda", i % torch.cuda.device_count()) for i in range(2)]
    net = Modes().to(devices[0])
    net.__dict__["forward"] = ParallelForward(net, "net", devices, threaded=True)
    x = torch.randn(5, 6, device=devices[0])
    with torch.autocast("cuda", torch.bfloat16):
        output, *modes = net(x)
    assert output.dtype == torch.bfloat16
    assert modes == [True, True, False]
    with torch.inference_mode():
        output, *modes = net(x.clone())
    assert output.is_inference()
    assert modes[1:] == [False, True]
    with torch.no_grad():
        assert not net(x)[0].requires_grad
    x[4] = torch.nan
    with pytest.raises(LookupError) as raised:
        net(x)
    assert "in replica 1 of 2 of net" in raised.value.__notes__[0]


def test_a_net_of_this_project_is_parallel() -> None:
    net = MLP(image_shape=(1, 4, 4), num_classes=4, width=8, depth=2)
    x = torch.randn(10, 1, 4, 4)
    expected = net(x)
    torch.testing.assert_close(forward(net, 4)(x), expected)
