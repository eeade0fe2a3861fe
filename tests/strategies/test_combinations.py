"""Every strategy with every feature of training: it trains as on one device, or says what does."""

from itertools import product
from pathlib import Path

import pytest

from comparison import Run, largest_difference, weights
from project.errors import UserError

pytestmark = pytest.mark.slow

# Three short epochs in float64, on two ranks.
EXPERIMENT = (
    "experiment=digits_mlp",
    "optimizer=sgd",
    "optimizer.momentum=0.9",
    "+optimizer.foreach=true",
    "scheduler=none",
    "model.net.width=16",
    "monitor=val/loss",
    "mode=min",
    "data.batch_size=32",
    "trainer.accelerator=cpu",
    "trainer.precision=64-true",
    "trainer.max_epochs=3",
    "trainer.limit_train_batches=3",
    "trainer.limit_val_batches=2",
    "trainer.limit_test_batches=2",
    "trainer.log_every_n_steps=1",
    "logger=none",
    "trainer.enable_progress_bar=false",
    "trainer.enable_model_summary=false",
)
# What is typed for a feature. Each changes the weights of one device, where it can. (Clipping by norm is compared in
# test_equivalence.py, averaged weights in test_weight_averaging.py.)
FEATURES = {
    "accumulation": ["trainer.accumulate_grad_batches=2"],  # two batches, and one that is left over
    "clip_value": ["trainer.gradient_clip_val=0.003", "trainer.gradient_clip_algorithm=value"],
    "plateau_and_early_stopping": [
        "scheduler=plateau",
        "scheduler.patience=0",
        "+scheduler.threshold=1.0",
        "callbacks=early_stopping",
        "callbacks.early_stopping.patience=2",
        "callbacks.early_stopping.min_delta=9",
    ],
    "detect_anomaly": ["trainer.detect_anomaly=true"],
    "compile": ["model._target_=combination_models.Compiled"],
    "bf16-mixed": ["trainer.precision=bf16-mixed"],
    "bf16-true": ["trainer.precision=bf16-true"],
}
WITHOUT_EFFECT = ("detect_anomaly", "compile")
INEXACT = {"bf16-mixed": 0.02, "bf16-true": 0.05}  # rounded to three digits, in another order
ALL_AT_ONCE = [
    *FEATURES["accumulation"],
    *FEATURES["clip_value"],
    *FEATURES["plateau_and_early_stopping"],
    "trainer.max_epochs=9",
]

# Where one of the cells is a sentence.
REFUSED = {
    ("dp", "compile"): "type model.compile=false, or trainer/strategy=ddp",
    ("pipeline", "compile"): "type model.compile=false, or trainer/strategy=fsdp",
    ("tensor_parallel", "detect_anomaly"): "type trainer/strategy=fsdp or trainer.devices=1",
    ("ddp_static_graph", "accumulation"): "type trainer/strategy=ddp",
}


@pytest.fixture(autouse=True)
def own_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    monkeypatch.syspath_prepend(Path(__file__).parents[1])


def assert_equal(one: tuple[Path, dict[str, float]], many: tuple[Path, dict[str, float]], tolerance: float) -> None:
    assert largest_difference(weights(one[0]), weights(many[0])) <= tolerance
    assert one[1].keys() == many[1].keys()
    for name, value in one[1].items():
        assert many[1][name] == pytest.approx(value, abs=max(tolerance, 1e-9), rel=tolerance), name


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("strategy", ["ddp", "dp", "fsdp", "tensor_parallel", "pipeline"])
def test_a_feature_does_what_it_does_on_one_device_or_is_refused(run: Run, strategy: str, feature: str) -> None:
    typed = (*EXPERIMENT, *FEATURES[feature])
    spread = (f"trainer/strategy={strategy}", "trainer.devices=2")
    if (strategy, feature) in REFUSED:
        with pytest.raises(UserError) as info:
            run(*typed, *spread)
        assert str(info.value).endswith(REFUSED[strategy, feature])
        return
    one = run(*typed)
    assert_equal(one, run(*typed, *spread), INEXACT.get(feature, 1e-10))


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_has_an_effect_on_one_device(run: Run, feature: str) -> None:
    plain, with_feature = run(*EXPERIMENT)[0], run(*EXPERIMENT, *FEATURES[feature])[0]
    difference = largest_difference(weights(plain), weights(with_feature))
    assert difference == 0 if feature in WITHOUT_EFFECT else difference > 1e-4


@pytest.mark.parametrize("strategy", ["ddp_find_unused", "ddp_powersgd", "ddp_local_sgd", "fsdp_tensor_parallel"])
def test_features_work_together_under_the_variants(run: Run, strategy: str) -> None:
    typed = (*EXPERIMENT, *ALL_AT_ONCE)
    one = run(*typed)
    assert_equal(one, run(*typed, f"trainer/strategy={strategy}", "trainer.devices=2"), 1e-10)


def test_a_static_graph_takes_all_but_accumulation(run: Run) -> None:
    typed = (*EXPERIMENT, *ALL_AT_ONCE, "trainer/strategy=ddp_static_graph", "trainer.devices=2")
    with pytest.raises(UserError, match=f"{REFUSED['ddp_static_graph', 'accumulation']}$"):
        run(*typed)
    typed = (*EXPERIMENT, *ALL_AT_ONCE, "trainer.accumulate_grad_batches=1")
    assert_equal(run(*typed), run(*typed, "trainer/strategy=ddp_static_graph", "trainer.devices=2"), 1e-10)


@pytest.mark.parametrize(
    ("strategy", "precision"),
    [
        ("ddp_powersgd trainer.strategy.start_step=2", "bf16-mixed"),
        ("ddp_local_sgd trainer.strategy.start_step=2", "bf16-true"),
        ("ddp_bf16_compress trainer.strategy.hook=fp16", "64-true"),
    ],
)
def test_compressed_and_local_steps_stay_near_one_device_in_any_precision(
    run: Run, strategy: str, precision: str
) -> None:
    typed = (*EXPERIMENT, f"trainer.precision={precision}")
    many, _ = run(*typed, *f"trainer/strategy={strategy}".split(), "trainer.devices=2")
    assert 0 < largest_difference(weights(run(*typed)[0]), weights(many)) < 0.05


@pytest.mark.parametrize("strategy", ["auto", "dp", "fsdp"])
def test_without_callbacks_the_weights_in_memory_are_tested_and_none_are_saved(run: Run, strategy: str) -> None:
    one, one_metrics = run(*EXPERIMENT, "callbacks=none")
    many, many_metrics = run(*EXPERIMENT, "callbacks=none", f"trainer/strategy={strategy}", "trainer.devices=2")
    assert many_metrics["test/loss"] == pytest.approx(one_metrics["test/loss"], abs=1e-10)
    assert not list(one.rglob("*.ckpt"))
    assert not list(many.rglob("*.ckpt"))


@pytest.mark.parametrize("strategy", ["auto", "dp", "fsdp"])
@pytest.mark.parametrize("typed", ["trainer.precision=16-mixed", "trainer.sync_batchnorm=true model/net=residual_cnn"])
def test_what_needs_a_gpu_is_refused_on_the_cpu(run: Run, strategy: str, typed: str) -> None:
    cpu = ("trainer.accelerator=cpu", "trainer.devices=2", f"trainer/strategy={strategy}")
    with pytest.raises(UserError, match="on the CPU: type trainer"):
        run(*typed.split(), *cpu)


def test_bf16_compression_needs_nccl(run: Run) -> None:
    with pytest.raises(UserError, match=r"hook=bf16 needs NCCL.*: type trainer/strategy=ddp_powersgd"):
        run(*EXPERIMENT, "trainer/strategy=ddp_bf16_compress", "trainer.devices=2")


# Models as users write them.

OWN = (
    "data._target_=combination_models.Named",
    "scheduler=none",
    "monitor=val/loss",
    "mode=min",
    "trainer.accelerator=cpu",
    "trainer.precision=64-true",
    "trainer.max_steps=6",
    "logger=none",
    "trainer.enable_progress_bar=false",
    "trainer.enable_model_summary=false",
)
NETS_OF_GAN = "trainer.strategy.modules=[net.generator,net.discriminator]"


@pytest.mark.parametrize(
    ("model", "strategy"),
    [
        *product(["ReturnsDicts", "BuiltLate", "SometimesUnused"], ["dp", "fsdp", "tensor_parallel"]),
        ("ReturnsDicts", "ddp"),
        ("BuiltLate", "ddp"),
        ("BuiltLate", "pipeline"),
        ("SometimesUnused", "ddp_find_unused"),
        *product(["Gan"], ["ddp_find_unused", "fsdp", "tensor_parallel"]),
        ("Gan", f"dp {NETS_OF_GAN}"),
    ],
)
def test_models_of_many_kinds_train_as_on_one_device(run: Run, model: str, strategy: str) -> None:
    typed = (f"model._target_=combination_models.{model}", *OWN)
    assert_equal(run(*typed), run(*typed, *f"trainer/strategy={strategy}".split(), "trainer.devices=2"), 1e-10)


@pytest.mark.parametrize(
    ("model", "strategy", "advice"),
    [
        ("SometimesUnused", "ddp", "type trainer/strategy=ddp_find_unused"),
        ("SometimesUnused", "ddp_static_graph", "type trainer/strategy=ddp_find_unused"),
        ("Gan", "auto", "type trainer/strategy=ddp_find_unused"),
        ("Gan", "ddp_static_graph", "type trainer/strategy=ddp_find_unused"),
        ("Gan", "ddp_local_sgd", "type trainer/strategy=ddp_find_unused"),
        ("Gan", "pipeline", "type trainer/strategy=fsdp"),
        ("SometimesUnused", "pipeline", "type trainer/strategy=fsdp"),
        ("Gan", "dp", f"type trainer/strategy=dp {NETS_OF_GAN}"),
        ("ReturnsDicts", "dp trainer.strategy.modules=[unused]", "or trainer/strategy=ddp"),
    ],
)
def test_what_a_strategy_can_not_train_is_told_with_one_that_can(
    run: Run, model: str, strategy: str, advice: str
) -> None:
    typed = (f"model._target_=combination_models.{model}", *OWN, "trainer.devices=2")
    with pytest.raises(UserError) as info:
        run(*typed, *f"trainer/strategy={strategy}".split())
    assert str(info.value).endswith(advice)
