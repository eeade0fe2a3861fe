"""Loaders that share a dataset's samples over ranks, by the indices of whole batches."""

import random
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from project.data.sampler import EvaluationBatches, TrainBatches

CollateFn = Callable[[list[Any]], Any]


class MapDataset(Protocol):
    """Samples by index. With `__getitems__` as well, a batch is fetched in one call."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def train_loader(
    dataset: MapDataset,
    collate_fn: CollateFn,
    batch_size: int,
    seed: int,
    shuffle: bool,
    trainer: L.Trainer | None,
    **arguments: Any,
) -> DataLoader[Any]:
    """The rank's shares of global batches of `batch_size`; see `TrainBatches`."""
    rank, num_replicas = place(trainer)
    # A run that overfits some batches must meet the same ones in every epoch.
    shuffle = shuffle and not getattr(trainer, "overfit_batches", 0)
    batches_per_step = getattr(trainer, "accumulate_grad_batches", 1)
    sampler = TrainBatches(len(dataset), batch_size, rank, num_replicas, seed, shuffle, batches_per_step)
    return _TrainLoader(_Batches(dataset, collate_fn), sampler, lambda: _batches_done(trainer), **arguments)


def evaluation_loader(
    dataset: MapDataset, collate_fn: CollateFn, batch_size: int, trainer: L.Trainer | None, **arguments: Any
) -> DataLoader[Any]:
    """Every sample exactly once over all ranks; see `EvaluationBatches`."""
    sampler = EvaluationBatches(len(dataset), batch_size, *place(trainer))
    return DataLoader(_Batches(dataset, collate_fn), sampler=sampler, batch_size=None, **arguments)


def place(trainer: L.Trainer | None) -> tuple[int, int]:
    """Rank and number of the ranks that share the data; ranks that split one model read the same data."""
    # Strategies for a single device have no such attribute.
    kwargs = getattr(trainer.strategy, "distributed_sampler_kwargs", None) if trainer is not None else None
    return (kwargs["rank"], kwargs["num_replicas"]) if kwargs else (0, 1)


def _batches_done(trainer: L.Trainer | None) -> int:
    """Batches of the epoch that the trainer has behind it: above 0 when a run resumes inside an epoch."""
    if trainer is None or not trainer.training:
        return 0
    return trainer.fit_loop.epoch_loop.batch_progress.current.ready


class _Batches(Dataset[Any]):
    """A dataset whose items are batches, found by the indices of their samples."""

    def __init__(self, samples: MapDataset, collate_fn: Callable[[list[Any]], Any]) -> None:
        self.samples = samples
        self.collate_fn = collate_fn

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, indices: Tensor) -> Any:
        if hasattr(self.samples, "__getitems__"):
            fetched = self.samples.__getitems__(indices)
        else:
            fetched = [self.samples[index] for index in indices.tolist()]
        return self.collate_fn(fetched) if isinstance(fetched, list) else fetched


class _TrainLoader(DataLoader[Any]):
    """A loader that starts to fetch when it is asked for the first batch, not when its iterator is made.

    Lightning makes the first iterator before it tells the sampler the epoch, and before a resumed run knows
    its position. Workers would fetch the wrong batches ahead.
    """

    def __init__(
        self, dataset: _Batches, sampler: TrainBatches, batches_done: Callable[[], int], **arguments: Any
    ) -> None:
        super().__init__(dataset, sampler=sampler, batch_size=None, generator=torch.Generator(), **arguments)
        self.batches_done = batches_done

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        assert isinstance(self.sampler, TrainBatches)
        self.sampler.first_batch = self.batches_done()
        # Seeds the workers: augmentations must differ between ranks and epochs.
        place = f"{self.sampler.seed}/{self.sampler.epoch}/{self.sampler.rank}"
        self.generator.manual_seed(random.Random(place).getrandbits(63))
        yield from super().__iter__()

    # Lightning takes a loader with these two methods for resumable. Its own counter of batches, which
    # `batches_done` reads, is all the state there is.
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass
