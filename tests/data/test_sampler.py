"""What the samplers promise, by brute force over small sizes."""

from itertools import chain

import pytest
import torch

from project.data import EvaluationBatches, TrainBatches


def global_batches(num_replicas: int, seed: int = 0, epoch: int = 0, shuffle: bool = True) -> list[list[int]]:
    """Batches of 12 out of 40 samples, each put together from its ranks' shares."""
    ranks = [TrainBatches(40, 12, rank, num_replicas, seed, shuffle) for rank in range(num_replicas)]
    for sampler in ranks:
        sampler.set_epoch(epoch)
    return [torch.cat(shares).tolist() for shares in zip(*ranks, strict=True)]


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4, 6])
def test_step_trains_on_the_same_samples_on_any_number_of_ranks(num_replicas: int) -> None:
    batches = global_batches(num_replicas)
    assert batches == global_batches(1)
    assert [len(batch) for batch in batches] == [12, 12, 12]
    assert len(set(chain.from_iterable(batches))) == 36


def test_order_differs_by_seed_and_epoch_and_by_their_sum() -> None:
    orders = [global_batches(1, seed, epoch) for seed in range(3) for epoch in range(3)]
    assert all(orders.count(order) == 1 for order in orders)
    assert global_batches(1, seed=0, epoch=2) == orders[2]


def test_order_without_shuffling_is_that_of_the_dataset() -> None:
    assert list(chain.from_iterable(global_batches(3, epoch=5, shuffle=False))) == list(range(36))


def test_batches_that_do_not_fill_a_step_are_dropped() -> None:
    sampler = TrainBatches(40, 4, rank=0, num_replicas=2, seed=0, batches_per_step=3)
    assert len(sampler) == len(list(sampler)) == 9


@pytest.mark.parametrize(
    ("length", "size", "per_step", "advice"),
    [
        (40, 20, 3, "type trainer.accumulate_grad_batches=2 or less"),
        (100, 12, 100, "type trainer.accumulate_grad_batches=8 or less"),
        (10, 12, 2, "type data.batch_size=4 or less"),
        (10, 12, 20, "type trainer.accumulate_grad_batches=1, and data.batch_size=10 or less"),
        (1, 12, 20, "type trainer.devices=1 or fewer"),
    ],
)
def test_a_step_that_a_set_cant_fill_is_refused_with_what_fits(
    length: int, size: int, per_step: int, advice: str
) -> None:
    with pytest.raises(ValueError, match=f"fewer than {per_step} batches of data.batch_size={size}: {advice}$"):
        TrainBatches(length, size, rank=0, num_replicas=2, seed=0, batches_per_step=per_step)


@pytest.mark.parametrize(
    ("length", "size", "per_step", "told"),
    [
        (100, 12, 1, None),  # 4 left out
        (
            100,
            12,
            5,
            "Each epoch leaves out 40 of 100 samples, which do not fill a step of 5 batches: "
            "type trainer.accumulate_grad_batches=4 for 4",
        ),
        (
            100,
            64,
            1,
            "Each epoch leaves out 36 of 100 samples, which do not fill a batch of 64: type data.batch_size=50 for 0",
        ),
        (3, 2, 1, None),  # two ranks can't do with less
    ],
)
def test_many_samples_that_no_epoch_reads_are_told(length: int, size: int, per_step: int, told: str | None) -> None:
    sampler = TrainBatches(length, size, rank=0, num_replicas=2, seed=0, batches_per_step=per_step)
    assert sampler.told_of_left_out() == told
    read = sum(len(batch) for batch in sampler) * 2
    assert sampler.left_out == length - read


def test_training_goes_on_at_the_first_batch_it_is_told() -> None:
    sampler = TrainBatches(40, 12, rank=0, num_replicas=1, seed=0)
    whole = [batch.tolist() for batch in sampler]
    sampler.first_batch = 2
    assert [batch.tolist() for batch in sampler] == whole[2:]
    assert len(sampler) == 3


@pytest.mark.parametrize(
    ("length", "batch_size", "num_replicas", "advice"),
    [
        (100, 30, 4, "type data.batch_size=28 or data.batch_size=32"),
        (100, 3, 4, "type data.batch_size=4$"),
        (10, 12, 4, "type data.batch_size=8 or less"),
        (3, 12, 4, "type trainer.devices=3 or fewer"),
    ],
)
def test_impossible_batch_sizes_are_refused_with_the_nearest_possible(
    length: int, batch_size: int, num_replicas: int, advice: str
) -> None:
    with pytest.raises(ValueError, match=advice):
        TrainBatches(length, batch_size, 0, num_replicas, seed=0)


@pytest.mark.parametrize("num_replicas", range(1, 7))
def test_evaluation_reads_every_sample_once_in_equally_many_batches(num_replicas: int) -> None:
    for length in range(num_replicas, 41):
        for batch_size in (1, 2, 5, 8, 64):
            samplers = [EvaluationBatches(length, batch_size, rank, num_replicas) for rank in range(num_replicas)]
            ranks = [[batch.tolist() for batch in sampler] for sampler in samplers]
            steps = [list(chain.from_iterable(shares)) for shares in zip(*ranks, strict=True)]

            assert list(chain.from_iterable(steps)) == list(range(length))
            assert [len(batches) for batches in ranks] == [len(sampler) for sampler in samplers]
            sizes = [len(batch) for batches in ranks for batch in batches]
            assert min(sizes) > 0
            # Where a step would not reach every rank, there are fewer and larger ones.
            assert max(sizes) <= max(-(-batch_size // num_replicas), 1) + (batch_size < 2 * num_replicas)


@pytest.mark.parametrize("num_replicas", [2, 3, 5])
def test_evaluation_step_reads_the_same_samples_on_any_number_of_ranks(num_replicas: int) -> None:
    samplers = [EvaluationBatches(53, 10, rank, num_replicas) for rank in range(num_replicas)]
    steps = [torch.cat(shares).tolist() for shares in zip(*samplers, strict=True)]
    assert steps == [batch.tolist() for batch in EvaluationBatches(53, 10, 0, 1)]


def test_evaluation_refuses_more_ranks_than_samples() -> None:
    with pytest.raises(ValueError, match=r"the set: 3 samples can't be spread over 4 ranks: type trainer.devices=3 or"):
        EvaluationBatches(3, 8, 0, 4)


def test_an_empty_set_of_an_evaluation_is_named() -> None:
    with pytest.raises(ValueError, match="^the val set is empty: check the path and the filters of your data$"):
        EvaluationBatches(0, 8, 0, 1, "the val set")


@pytest.mark.parametrize(
    ("length", "batch_size", "told"),
    [
        (100, 30, "^batch_size=30 is .* equally: give the loader a batch_size of 28 or 32$"),
        (
            10,
            12,
            "^the train set holds 10 samples, fewer than batch_size=12: give the loader a batch_size of 8 or less$",
        ),
    ],
)
def test_nobody_is_told_to_type_what_their_class_does_not_take(length: int, batch_size: int, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        TrainBatches(length, batch_size, 0, 4, seed=0, is_typed=False)


def test_batches_that_cant_change_are_told_as_the_loader_has_them() -> None:
    saved = TrainBatches(40, 8, 0, 1, seed=0).state_dict()
    with pytest.raises(ValueError, match=r"^batch_size=4 differs from the run's 8, .*: give the loader what it had$"):
        TrainBatches(40, 4, 0, 1, seed=0, is_typed=False).check(saved)
    with pytest.raises(ValueError, match=r"^data.batch_size=4 differs .*: type data.batch_size=8$"):
        TrainBatches(40, 4, 0, 1, seed=0).check(saved)


def test_an_empty_train_set_is_told() -> None:
    with pytest.raises(ValueError, match="the train set is empty"):
        TrainBatches(0, 4, rank=0, num_replicas=1, seed=0)
