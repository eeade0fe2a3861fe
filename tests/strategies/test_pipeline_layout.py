"""How pipelines lie on ranks and cut their batches."""

from typing import Any

import pytest

from project.config import preflight
from project.errors import UserError
from project.strategies import pipeline_layout, ranks_per_batch
from project.strategies.pipeline_layout import PipelineLayout, layout_of

STRATEGY = {"_target_": "project.strategies.pipeline.PipelineStrategy"}


@pytest.mark.parametrize(
    ("arguments", "local_world_size", "ranks", "stages"),
    [
        ({}, 4, 4, 4),
        ({"stages": 2}, 4, 2, 2),
        ({"schedule": "interleaved"}, 2, 2, 4),
        ({"schedule": "interleaved", "stages": 4}, 4, 2, 4),
        ({"schedule": "interleaved", "stages_per_rank": 3}, 2, 2, 6),
        ({}, 1, 1, 1),
    ],
)
def test_stages_are_laid_out_on_ranks(
    arguments: dict[str, Any], local_world_size: int, ranks: int, stages: int
) -> None:
    layout = layout_of(arguments, local_world_size)
    assert (layout.ranks, layout.stages) == (ranks, stages)
    assert ranks_per_batch(STRATEGY | arguments, local_world_size) == ranks


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"schedule": "1b1f"}, "schedule=1b1f is not known .*: type trainer.strategy.schedule=1f1b"),
        ({"stages": 0}, "stages=0 can't be: type a whole number from 1, or auto"),
        ({"micro_batches": "many"}, "micro_batches=many can't be"),
        ({"stages": 3}, "trainer.devices=4 is no multiple of the 3 ranks .*: type trainer.devices=6"),
        ({"stages": 1}, "nothing to pass on .*: type trainer/strategy=ddp"),
        ({"stages_per_rank": 2}, "only interleaved stages share a rank: type trainer.strategy.schedule=interleaved"),
        ({"schedule": "interleaved", "stages_per_rank": 1}, "type trainer.strategy.stages_per_rank=2"),
        ({"schedule": "interleaved", "stages": 3}, "type trainer.strategy.stages=4"),
        ({"micro_batches": 3}, "micro_batches=3 can't be run by schedule=1f1b with 4 stages .*micro_batches=4 or more"),
        ({"schedule": "interleaved", "micro_batches": 9}, "type trainer.strategy.micro_batches=8 or 12"),
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        layout_of(arguments, 4)


@pytest.mark.parametrize(
    ("layout", "length", "number"),
    [
        (PipelineLayout("gpipe", 2), 64, 8),
        (PipelineLayout("1f1b", 4), 64, 16),
        (PipelineLayout("1f1b", 4), 20, 10),
        (PipelineLayout("1f1b", 4), 3, None),
        (PipelineLayout("1f1b", 4), 17, None),
        (PipelineLayout("gpipe", 4), 17, 1),
        (PipelineLayout("interleaved", 4, 2), 36, 12),
        (PipelineLayout("interleaved", 4, 2), 9, 3),
        (PipelineLayout("gpipe", 2, micro_batches=4), 12, 4),
        (PipelineLayout("gpipe", 2, micro_batches=4), 10, None),
    ],
)
def test_batches_are_cut_into_as_many_equal_parts_as_the_schedule_can_run(
    layout: PipelineLayout, length: int, number: int | None
) -> None:
    assert layout.cut(length) == number


@pytest.mark.parametrize("layout", [PipelineLayout("1f1b", 2, micro_batches=4), PipelineLayout("interleaved", 4, 2)])
@pytest.mark.parametrize("length", [1, 2, 5, 53, 64])
def test_any_batch_fits_into_equal_parts_that_are_filled_up(layout: PipelineLayout, length: int) -> None:
    number, size = layout.cut_padded(length)
    assert number * size >= length
    assert size == -(-length // layout.most_micro_batches)
    if layout.schedule == "interleaved":
        assert number % max(1, number // layout.ranks) == 0


@pytest.mark.parametrize(
    ("batch_size", "arguments", "advice"),
    [
        (66, {"micro_batches": 4}, "a pipeline 33 samples.*into 4 equal .*data.batch_size=64 or data.batch_size=72"),
        (2, {}, "a pipeline 1 samples.*at least 2 equal .*type data.batch_size=4, or"),
    ],
)
def test_a_batch_size_that_pipelines_cannot_cut_is_refused_before_ranks_start(
    batch_size: int, arguments: dict[str, Any], advice: str
) -> None:
    config = {"data": {"_target_": "project.data.digits.Digits", "batch_size": batch_size}}
    with pytest.raises(UserError, match=advice):
        preflight.check_batch_size(config, 2, layout_of({"stages": 2} | arguments, 4))


def test_other_strategies_have_no_layout() -> None:
    assert pipeline_layout("ddp", 4) is None
    assert ranks_per_batch("ddp", 4) == 1
    assert ranks_per_batch({"tensor_parallel_size": 2}, 4) == 2
