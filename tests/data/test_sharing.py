"""Plain data modules are equal under any number of ranks."""

from collections.abc import Iterator
from itertools import chain
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from project.data.sharing import share


class Plain(L.LightningDataModule):
    def __init__(self, length: int = 22, shuffle: bool = True, **arguments: Any) -> None:
        super().__init__()
        self.loader_arguments = {"batch_size": 4, **arguments}
        self.samples = list(range(length))
        self.shuffle = shuffle

    def train_dataloader(self) -> Any:
        return DataLoader(self.samples, shuffle=self.shuffle, **self.loader_arguments)  # type: ignore[arg-type]

    def val_dataloader(self) -> Any:
        return [DataLoader(self.samples, **self.loader_arguments)]  # type: ignore[arg-type]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(22))


def shared(datamodule: L.LightningDataModule, rank: int = 0, num_replicas: int = 1, seed: int = 0) -> Any:
    strategy = SimpleNamespace(distributed_sampler_kwargs={"rank": rank, "num_replicas": num_replicas})
    trainer = SimpleNamespace(strategy=strategy, training=False, overfit_batches=0, accumulate_grad_batches=1)
    datamodule.trainer = trainer  # type: ignore[assignment]
    share(datamodule, seed)
    return datamodule


def train_batches(num_replicas: int, seed: int = 0, **arguments: Any) -> list[list[int]]:
    ranks = [shared(Plain(**arguments), rank, num_replicas, seed).train_dataloader() for rank in range(num_replicas)]
    return [torch.cat(shares).tolist() for shares in zip(*ranks, strict=True)]


@pytest.mark.parametrize("num_replicas", [2, 4])
def test_step_trains_on_the_same_global_batch_on_any_number_of_ranks(num_replicas: int) -> None:
    assert train_batches(num_replicas) == train_batches(1)
    assert train_batches(1) != train_batches(1, seed=1)
    assert [len(batch) for batch in train_batches(1)] == [4] * 5


def test_loader_that_does_not_shuffle_is_not_shuffled() -> None:
    assert list(chain.from_iterable(train_batches(2, shuffle=False))) == list(range(20))


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4])
def test_evaluation_reads_every_sample_exactly_once(num_replicas: int) -> None:
    read = []
    for rank in range(num_replicas):
        (loader,) = shared(Plain(), rank, num_replicas).val_dataloader()
        read += torch.cat(list(loader)).tolist()
    assert sorted(read) == list(range(22))


class Several(L.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        first, second = (DataLoader(range(22), 4, shuffle=True) for _ in range(2))  # type: ignore[var-annotated, arg-type]
        self.combined = CombinedLoader({"first": first, "rest": [second]}, "min_size")

    def train_dataloader(self) -> Any:
        return self.combined

    def val_dataloader(self) -> Any:
        return CombinedLoader([DataLoader(range(22), 4)], "sequential")  # type: ignore[arg-type]


def test_loaders_that_lightning_combines_are_shared_one_by_one() -> None:
    def steps(num_replicas: int) -> list[tuple[list[int], list[int]]]:
        ranks = [shared(Several(), rank, num_replicas).train_dataloader() for rank in range(num_replicas)]
        assert {loader._mode for loader in ranks} == {"min_size"}
        together = zip(*([batch for batch, _, _ in loader] for loader in ranks), strict=True)
        return [
            (torch.cat([b["first"] for b in shares]).tolist(), torch.cat([b["rest"][0] for b in shares]).tolist())
            for shares in together
        ]

    assert steps(2) == steps(1)
    assert [len(first) for first, _ in steps(2)] == [4] * 5
    assert all(first != second for first, second in steps(1))
    read = [batch.tolist() for rank in range(2) for batch, _, _ in shared(Several(), rank, 2).val_dataloader()]
    assert sorted(chain.from_iterable(read)) == list(range(22))


def test_combined_loader_that_the_module_holds_is_left_as_it_is() -> None:
    datamodule = shared(Several(), 0, 2)
    loaders = list(datamodule.combined.flattened)
    for _ in range(2):
        assert datamodule.train_dataloader().flattened[0].sampler.num_replicas == 2
    assert datamodule.combined.flattened == loaders


def test_hooks_that_the_module_lacks_stay_absent() -> None:
    datamodule = shared(Plain())
    assert type(datamodule).test_dataloader is L.LightningDataModule.test_dataloader
    assert isinstance(datamodule, Plain)
    assert type(datamodule).__name__ == "Plain"


def test_collate_function_and_workers_of_the_loader_are_kept() -> None:
    loader = shared(Plain(collate_fn=sum, num_workers=1)).train_dataloader()
    assert loader.num_workers == 1
    assert loader.dataset[torch.tensor([1, 2, 3])] == 6


def test_own_sampler_is_left_alone_on_one_rank_and_refused_on_two() -> None:
    class Backwards(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(21, -1, -1))

    datamodule = Plain(sampler=Backwards(), shuffle=False)
    assert torch.cat(list(shared(datamodule).train_dataloader())).tolist() == list(range(21, -1, -1))
    with pytest.raises(ValueError, match="Plain: the sampler Backwards .* each of the 2 ranks all samples"):
        shared(Plain(sampler=Backwards(), shuffle=False), 0, 2).train_dataloader()


class OfBatches(L.LightningDataModule):
    """What torch makes of batch_size, shuffle and drop_last, written out."""

    def train_dataloader(self) -> Any:
        samples = range(22)
        return DataLoader(samples, batch_sampler=BatchSampler(RandomSampler(samples), 4, True))  # type: ignore[arg-type]

    def val_dataloader(self) -> Any:
        samples = range(22)
        return DataLoader(samples, batch_sampler=BatchSampler(SequentialSampler(samples), 4, False))  # type: ignore[arg-type]


def test_batch_sampler_of_torch_is_shared_like_a_batch_size() -> None:
    ranks = [shared(OfBatches(), rank, 2) for rank in range(2)]
    steps = zip(*(rank.train_dataloader() for rank in ranks), strict=True)
    assert [torch.cat(shares).tolist() for shares in steps] == train_batches(1)
    read = [torch.cat(list(rank.val_dataloader())).tolist() for rank in ranks]
    assert sorted(chain.from_iterable(read)) == list(range(22))


class Pairs:
    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1], [2, 3]])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            {"batch_size": 1, "batch_sampler": Pairs()},
            "the batch_sampler Pairs of a loader .* give the loader a batch_",
        ),
        (
            {"batch_size": 1, "batch_sampler": BatchSampler(RandomSampler(range(22), num_samples=8), 4, False)},
            "the sampler RandomSampler of a loader .* as sampler=",
        ),
        ({"batch_size": None}, "the batch_size=None of a loader .* let the dataset return single samples"),
    ],
)
def test_batches_of_another_kind_are_left_alone_on_one_rank_and_refused_on_two(
    arguments: dict[str, Any], told: str
) -> None:
    assert type(shared(Plain(shuffle=False, **arguments)).train_dataloader()) is DataLoader
    with pytest.raises(ValueError, match=f"^Plain: {told}"):
        shared(Plain(shuffle=False, **arguments), 0, 2).train_dataloader()


class Taking(Plain):
    def __init__(self, batch_size: int) -> None:
        super().__init__(3, batch_size=batch_size)


def test_advice_is_what_the_class_takes() -> None:
    with pytest.raises(ValueError, match="fewer than batch_size=4: give the loader a batch_size of 3 or less"):
        shared(Plain(3)).train_dataloader()
    with pytest.raises(ValueError, match=r"fewer than data.batch_size=4: type data.batch_size=3 or less"):
        shared(Taking(4)).train_dataloader()


def test_empty_dataset_of_an_evaluation_is_named() -> None:
    with pytest.raises(ValueError, match=r"^the dataset of Plain.val_dataloader is empty"):
        shared(Plain(0, shuffle=False)).val_dataloader()


def test_iterable_dataset_is_refused_on_two_ranks() -> None:
    datamodule = Plain(shuffle=False)
    datamodule.samples = Stream()  # type: ignore[assignment]
    assert len(list(shared(datamodule).train_dataloader())) == 6
    with pytest.raises(ValueError, match="iterable dataset .* each of the 2 ranks all samples"):
        other = Plain(shuffle=False)
        other.samples = Stream()  # type: ignore[assignment]
        shared(other, 0, 2).train_dataloader()
