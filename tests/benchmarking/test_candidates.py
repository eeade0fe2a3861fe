"""What is tried against what bounds a run."""

from typing import Any

import pytest

from project.benchmarking.candidates import Machine, candidates
from project.benchmarking.optimize import merged, noise
from project.tracking.remedies import changes_results

CPU = Machine(cores_per_rank=2, on_gpu=False, several=False)
GPUS = Machine(cores_per_rank=8, on_gpu=True, several=True)


def config(**data: Any) -> dict[str, Any]:
    return {
        "data": {"batch_size": 64, "num_workers": 0, "prefetch_factor": None, "pin_memory": False} | data,
        "model": {"compile": False, "channels_last": False},
        "launch": {"threads_per_rank": "auto"},
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": 0.1},
        "trainer": {"strategy": "auto", "precision": "32-true", "accumulate_grad_batches": 2},
    }


def test_starving_input_is_tried_with_ever_more_workers() -> None:
    assert candidates("input", ["data.num_workers=2"], config(), CPU) == [
        "data.num_workers=2",
        "data.num_workers=4",
        "data.num_workers=8",
        "data.num_workers=16",
    ]
    assert candidates("input", [], config(num_workers=8), CPU) == ["data.num_workers=16", "data.prefetch_factor=4"]


def test_what_a_data_module_does_not_take_is_not_tried() -> None:
    bare = config() | {"data": {"length": 3}}
    assert candidates("input", [], bare, CPU) == []
    assert not any("batch_size" in text for text in candidates("host", [], bare, CPU))


def test_pinned_memory_helps_only_gpus() -> None:
    assert candidates("transfer", [], config(), CPU) == []
    assert candidates("transfer", [], config(), GPUS) == ["data.pin_memory=true"]


def test_synchronisation_is_tried_away_on_several_ranks_only() -> None:
    assert candidates("synchronisation", [], config(), CPU) == []
    tried = candidates("synchronisation", ["trainer.accumulate_grad_batches=8"], config(), GPUS)
    assert tried[0] == "trainer.accumulate_grad_batches=8"
    assert {"trainer/strategy=ddp_static_graph", "trainer/strategy=ddp_bf16_compress"} <= set(tried)
    assert len(tried) == len(set(tried))


def test_buckets_grow_where_the_strategy_takes_arguments() -> None:
    several = Machine(cores_per_rank=1, on_gpu=False, several=True)
    static = config()
    static["trainer"]["strategy"] = {"_target_": "lightning.pytorch.strategies.DDPStrategy", "static_graph": True}
    assert "+trainer.strategy.bucket_cap_mb=100" in candidates("synchronisation", [], static, several)
    assert not any("bucket" in text for text in candidates("synchronisation", [], config(), several))


def test_computing_is_tried_with_channels_last_and_on_a_cpu_with_one_thread() -> None:
    tried = candidates("compute", [], config(), CPU)
    assert {"model.channels_last=true", "launch.threads_per_rank=1"} <= set(tried)
    assert "launch.threads_per_rank=1" not in candidates("compute", [], config(), GPUS)


def test_an_argument_that_the_config_has_is_overridden_and_another_added() -> None:
    theirs = config() | {"model": {"_target_": "lab.Model"}}
    assert "+optimizer.fused=true" in candidates("compute", [], theirs, CPU)
    has = theirs | {"optimizer": {"_target_": "torch.optim.SGD", "fused": None}}
    assert "optimizer.fused=true" in candidates("compute", [], has, CPU)
    fused = theirs | {"optimizer": {"_target_": "torch.optim.SGD", "fused": True}}
    assert not any("fused" in text for text in candidates("compute", [], fused, CPU))


def test_models_that_fuse_their_optimizer_anyway_are_not_tried_so_unless_they_were_told_not_to() -> None:
    ours = config() | {"model": {"_target_": "project.models.ImageClassifier"}}
    assert not any("fused" in text for text in candidates("compute", [], ours, CPU))
    told = ours | {"optimizer": {"_target_": "torch.optim.AdamW", "fused": False}}
    assert "optimizer.fused=true" in candidates("compute", [], told, CPU)


@pytest.mark.parametrize(
    ("override", "changes"),
    [
        ("data.num_workers=4", False),
        ("model.compile=true", False),
        ("trainer/strategy=ddp_static_graph", False),
        ("data.batch_size=128", True),
        ("trainer.precision=bf16-mixed", True),
        ("trainer.accumulate_grad_batches=4", True),
        ("trainer/strategy=ddp_powersgd", True),
    ],
)
def test_what_changes_results_is_marked(override: str, changes: bool) -> None:
    assert changes_results(override) is changes


def test_a_later_override_replaces_an_earlier_one_of_its_key() -> None:
    assert merged(["a=1", "+b=2", "c=3"], ["b=4", "+c=5"]) == ["a=1", "b=4", "+c=5"]


def test_noise_is_the_largest_half_spread() -> None:
    assert noise([100, 100], [90, 110]) == pytest.approx(0.1)
    assert noise([5.0]) == 0
