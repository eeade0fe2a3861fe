"""What is refused before anything starts because two choices don't go together."""

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from project.config import combinations, preflight, strategy_names
from project.config.composition import config_folder
from project.errors import UserError
from project.launch import devices

Compose = Callable[..., DictConfig]


def checked(compose: Compose, *overrides: str, name: str = "train") -> None:
    """The config as a job checks it."""
    config: Any = OmegaConf.to_container(compose(*overrides, name=name), resolve=True)
    config["trainer"]["strategy"] = strategy_names.resolve(config["trainer"]["strategy"])
    config["trainer"]["devices"] = devices.parse(config["trainer"]["devices"])
    preflight.check(config)
    combinations.check(config)


@pytest.fixture
def deepspeed(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """``deepspeed(True)``: the package is installed; ``deepspeed(False)``: it is not."""
    find_spec = importlib.util.find_spec

    def install(there: bool) -> None:
        found = importlib.util.find_spec("torch") if there else None
        monkeypatch.setattr(importlib.util, "find_spec", lambda n: found if n == "deepspeed" else find_spec(n))

    return install


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)


NAMES = ["deepspeed", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3", "deepspeed_stage_3_offload"]


@pytest.mark.parametrize("typed", [*(f"trainer.strategy={name}" for name in NAMES), "trainer/strategy=deepspeed"])
def test_deepspeed_without_its_package_names_the_extra(
    compose: Compose, deepspeed: Callable[[bool], None], typed: str
) -> None:
    deepspeed(False)
    with pytest.raises(UserError, match=r'needs the package deepspeed.*: type pip install "project\[deepspeed\]"$'):
        checked(compose, typed)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("typed", [*(f"trainer.strategy={name}" for name in NAMES), "trainer/strategy=deepspeed"])
@pytest.mark.parametrize("accelerator", ["cpu", "auto"])
def test_deepspeed_on_the_cpu_is_refused_with_what_spreads_the_same(
    compose: Compose, deepspeed: Callable[[bool], None], typed: str, accelerator: str
) -> None:
    deepspeed(True)
    with pytest.raises(UserError, match=r"runs on CUDA devices only.*: type trainer/strategy=fsdp"):
        checked(compose, typed, f"trainer.accelerator={accelerator}")


def test_deepspeed_on_cuda_passes_but_for_averaged_weights(compose: Compose, deepspeed: Callable[[bool], None]) -> None:
    deepspeed(True)
    options = ("trainer/strategy=deepspeed", "trainer.accelerator=cuda")
    checked(compose, *options)
    with pytest.raises(UserError, match="callbacks=ema.*: type trainer/strategy=fsdp, or callbacks=default"):
        checked(compose, *options, "callbacks=ema")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("deepspeed", {"stage": 2}),
        ("deepspeed_stage_2", {"stage": 2}),
        ("deepspeed_stage_3", {"stage": 3}),
        ("deepspeed_stage_3_offload", {"stage": 3, "offload_optimizer": True, "offload_parameters": True}),
    ],
)
def test_lightnings_names_for_deepspeed_are_our_file_with_their_stage(name: str, expected: dict[str, Any]) -> None:
    of_file = strategy_names.resolve("deepspeed")
    assert strategy_names.resolve(name).items() >= (of_file | expected).items()


IMPOSSIBLE = [
    ("trainer.precision=transformer-engine", "type trainer.precision=bf16-mixed"),
    ("trainer.precision=16-mixed", "type trainer.precision=bf16-mixed"),
    ("trainer.precision=16", "type trainer.precision=bf16-mixed"),
    ("trainer.precision=16-true", "type trainer.precision=bf16-true"),
    ("trainer.sync_batchnorm=true trainer.devices=2", "type trainer.sync_batchnorm=false"),
    ("trainer.accumulate_grad_batches=2 trainer/strategy=ddp_static_graph", "type trainer/strategy=ddp"),
    (
        "trainer.detect_anomaly=true trainer.devices=2 trainer/strategy=tensor_parallel",
        "type trainer/strategy=fsdp or trainer.devices=1",
    ),
]


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(("typed", "advice"), IMPOSSIBLE)
def test_choices_that_do_not_go_together_are_refused_with_what_does(compose: Compose, typed: str, advice: str) -> None:
    with pytest.raises(UserError) as info:
        checked(compose, *typed.split())
    assert str(info.value).startswith(typed.split("=")[0])
    assert str(info.value).endswith(advice)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    "typed",
    [
        "trainer.sync_batchnorm=true",
        "trainer.accumulate_grad_batches=2 trainer/strategy=ddp",
        "trainer/strategy=ddp_static_graph",
        "trainer.detect_anomaly=true trainer.devices=2 trainer/strategy=fsdp",
        "trainer.detect_anomaly=true trainer/strategy=tensor_parallel",
        "trainer.precision=bf16-true",
    ],
)
def test_each_choice_alone_passes(compose: Compose, typed: str) -> None:
    checked(compose, *typed.split())


# Every file of conf/trainer/strategy is in one of the two.
WHOLE = (
    "auto", "ddp", "ddp_bf16_compress", "ddp_find_unused", "ddp_local_sgd", "ddp_powersgd", "ddp_static_graph",
)  # fmt: skip
SPREAD = ("deepspeed", "dp", "fsdp", "fsdp_tensor_parallel", "layer_split", "pipeline", "tensor_parallel")


@pytest.mark.parametrize(
    "compression",
    [
        {"callbacks": {"mine": {"_target_": "project.compression.pruning.Pruning"}}},
        {"callbacks": {"quantize": {"_target_": "project.compression.quantization.Quantization"}}},
        {"quantize": "int8_dynamic"},
    ],
    ids=["pruning", "quantize", "quantized_evaluation"],
)
def test_what_changes_weights_is_refused_where_a_process_has_not_all(
    deepspeed: Callable[[bool], None], compression: dict[str, Any]
) -> None:
    deepspeed(True)
    assert {*WHOLE, *SPREAD} == {path.stem for path in (config_folder() / "trainer" / "strategy").glob("*.yaml")}
    for name in (*WHOLE, *SPREAD):
        trainer = {"strategy": strategy_names.resolve(name), "accelerator": "cuda", "devices": 2}
        if name in WHOLE:
            combinations.check(compression | {"trainer": trainer})
            continue
        with pytest.raises(
            UserError, match=r"needs the whole model in each process, and \w+ .*type trainer/strategy=ddp$"
        ):
            combinations.check(compression | {"trainer": trainer})


def test_pruning_needs_a_known_end(compose: Compose) -> None:
    checked(compose, "callbacks=pruning", "trainer.max_epochs=-1", "trainer.max_steps=9")
    with pytest.raises(UserError, match=r"trainer.max_epochs=-1 leaves its end open: type trainer.max_epochs=N"):
        checked(compose, "callbacks=pruning", "trainer.max_epochs=-1", "trainer.max_time=00:00:01:00")


def test_pruned_weights_have_no_average(compose: Compose) -> None:
    average = "+callbacks.ema._target_=project.strategies.weight_averaging.WeightAveraging"
    with pytest.raises(UserError, match="callbacks=pruning and an average of the weights can't be combined"):
        checked(compose, "callbacks=pruning", average)


@pytest.mark.parametrize(
    ("typed", "advice"),
    [
        ("trainer.precision=16-mixed", "type trainer.precision=bf16-mixed"),
        ("callbacks.nan.on_nan=skip", "type callbacks.nan.on_nan=stop"),
    ],
)
def test_powersgd_would_carry_an_overflow_over_to_all_later_steps(
    compose: Compose, monkeypatch: pytest.MonkeyPatch, typed: str, advice: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(UserError, match=f"PowerSGD carries .*{advice}, or trainer/strategy=ddp$"):
        checked(compose, typed, "trainer/strategy=ddp_powersgd", "trainer.devices=2")
    checked(compose, typed, "trainer/strategy=ddp", "trainer.devices=2")


def test_half_precision_and_synchronised_batch_norm_are_for_gpus(
    compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    checked(compose, "trainer.precision=16-mixed", "trainer.sync_batchnorm=true", "trainer.devices=2")


@pytest.mark.usefixtures("no_gpu")
def test_evaluation_of_a_run_that_synchronised_batch_norm_works_anywhere(compose: Compose) -> None:
    config: Any = OmegaConf.to_container(compose(), resolve=True)
    del config["test"]  # evaluation has none
    config["trainer"] |= {"sync_batchnorm": True, "devices": 2, "detect_anomaly": True}
    combinations.check(config)


@pytest.mark.parametrize(
    ("typed", "refused"),
    [
        ("trainer.devices=2", True),
        ("trainer.devices=2 trainer/strategy=fsdp", True),
        ("trainer.devices=2 trainer/strategy=dp", False),
        ("trainer.devices=1", False),
    ],
)
def test_an_optimizer_that_decides_by_the_loss_is_refused_on_several_ranks(
    compose: Compose, typed: str, refused: bool
) -> None:
    overrides = ["optimizer._target_=torch.optim.LBFGS", "trainer.accelerator=cpu", *typed.split()]
    if not refused:
        checked(compose, *overrides)
        return
    with pytest.raises(UserError, match=r"LBFGS decides by the loss.*type trainer\.devices=1, trainer/strategy=dp"):
        checked(compose, *overrides)
