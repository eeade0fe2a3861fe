"""Whatever the strategy, it is the same experiment."""

from itertools import product

import pytest

from comparison import Run, largest_difference, weights
from project.config.from_checkpoint import compose_from_checkpoint

pytestmark = pytest.mark.slow

# Twenty steps in float64 on the CPU; 269 or 270 samples in validation and test: no number of ranks divides both.
EXPERIMENT = (
    "experiment=digits_mlp",
    "optimizer=sgd",
    "optimizer.momentum=0.9",
    "model.net.width=32",
    "trainer.accelerator=cpu",
    "trainer.precision=64-true",
    "trainer.max_steps=20",
    "trainer.gradient_clip_val=0.5",
    "data.test_fraction=0.1503",
    "logger=none",
    "trainer.enable_progress_bar=false",
    "trainer.enable_model_summary=false",
)
EXACT = ("ddp", "ddp_static_graph", "ddp_find_unused", "dp", "layer_split", "fsdp", "tensor_parallel", "pipeline")


@pytest.mark.parametrize(
    ("strategy", "devices"), [*product(EXACT, (2, 4)), ("fsdp_tensor_parallel", 4), ("fsdp_tensor_parallel", 2)]
)
def test_weights_and_metrics_are_those_of_one_device(run: Run, strategy: str, devices: int) -> None:
    one, one_metrics = run(*EXPERIMENT)
    many, many_metrics = run(*EXPERIMENT, f"trainer/strategy={strategy}", f"trainer.devices={devices}")
    assert largest_difference(weights(one), weights(many)) <= 1e-10
    for name, value in one_metrics.items():
        if name.startswith(("val/", "test/")):
            assert many_metrics[name] == pytest.approx(value, abs=1e-12), name
        else:
            assert many_metrics[name] == pytest.approx(value, abs=1e-9), name


@pytest.mark.parametrize(
    ("strategy", "why", "tolerance"),
    [
        ("ddp_powersgd", "early steps are not compressed: they are DDP's", 1e-10),
        ("ddp_powersgd trainer.strategy.start_step=2 trainer.strategy.rank=1", "rank 1 keeps little of a step", 0.2),
        ("ddp_local_sgd", "early steps average gradients: they are DDP's", 1e-10),
        ("ddp_local_sgd trainer.strategy.start_step=4", "ranks step on their own shares between averages", 0.2),
    ],
)
def test_compressed_and_local_steps_stay_near_one_device(run: Run, strategy: str, why: str, tolerance: float) -> None:
    one, _ = run(*EXPERIMENT)
    many, _ = run(*EXPERIMENT, *f"trainer/strategy={strategy}".split(), "trainer.devices=2")
    difference = largest_difference(weights(one), weights(many))
    assert difference <= tolerance, why
    if tolerance > 1e-3:
        assert difference > 1e-6, "the hook has no effect"


@pytest.mark.parametrize("strategy", ["ddp", "dp", "layer_split", "fsdp", "tensor_parallel", "pipeline"])
def test_accumulating_four_batches_equals_one_of_four_times_the_size(run: Run, strategy: str) -> None:
    parts = (f"trainer/strategy={strategy}", "trainer.devices=2", "trainer.gradient_clip_val=null")
    small, _ = run(*EXPERIMENT, *parts, "data.batch_size=64", "trainer.accumulate_grad_batches=4")
    large, _ = run(*EXPERIMENT, *parts, "data.batch_size=256")
    assert largest_difference(weights(small), weights(large)) <= 1e-10


@pytest.mark.parametrize(
    ("trained", "evaluated"),
    [
        ("ddp", "dp"),
        ("dp", "layer_split"),
        ("layer_split", "fsdp"),
        ("fsdp", "tensor_parallel"),
        ("tensor_parallel", "pipeline"),
        ("pipeline", "ddp"),
    ],
)
def test_checkpoint_of_one_strategy_has_the_same_metrics_under_another(run: Run, trained: str, evaluated: str) -> None:
    folder, metrics = run(*EXPERIMENT, f"trainer/strategy={trained}", "trainer.devices=2")
    checkpoint = f"ckpt_path={folder}/checkpoints/best.ckpt"
    name = compose_from_checkpoint("evaluate", ["evaluate", checkpoint])
    options = ("trainer.accelerator=cpu", f"trainer/strategy={evaluated}", "trainer.devices=4")
    _, again = run(checkpoint, *options, command="evaluate", config=name)
    for metric in ("test/loss", "test/accuracy", "test/f1"):
        assert again[metric] == pytest.approx(metrics[metric], abs=1e-12)
