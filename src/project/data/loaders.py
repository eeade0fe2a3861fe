"""Loaders that share a dataset's samples over ranks, by the indices of whole batches."""

import os
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, Protocol

import lightning as L
import numpy as np
import torch
from lightning.fabric.utilities.types import _Stateful
from lightning_utilities.core.apply_func import apply_to_collection
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.data.dataloader import _BaseDataLoaderIter

from project.data.draws import sample_seeds
from project.data.prefetch import Copies, CudaCopies, ahead
from project.data.sampler import EvaluationBatches, TrainBatches
from project.data.workers import READ, WorkersIterator, end_workers_at_exit, start_worker
from project.notices import notice

CollateFn = Callable[[list[Any]], Any]


class MapDataset(Protocol):
    """Samples by index. With `__getitems__` as well, a batch is fetched in one call, of a list of indices.

    `getitems_in_training(indices, seeds)` takes its place in training where there is one: it is also given a random
    seed of each sample, (B,) int64, which depends on the run's seed, the epoch and the sample's index alone.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class SampleError(ValueError):
    """A sentence about a file that can't be read, also after a worker raised it.

    Of an exception in a worker torch makes another of its type, with the worker's whole traceback as its text.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text.rpartition(f"{type(self).__name__}: ")[2].partition("\n")[0])


def train_loader(
    dataset: MapDataset,
    collate_fn: CollateFn,
    batch_size: int,
    seed: int,
    shuffle: bool,
    trainer: L.Trainer | None,
    prefetch_to_device: bool = False,
    is_typed: bool = True,
    **arguments: Any,
) -> DataLoader[Any]:
    """The rank's shares of global batches of `batch_size`; see `TrainBatches`.

    With `prefetch_to_device` each batch is on its way to a CUDA device while the one before is computed on. Without
    `is_typed` nobody is told to type `data.batch_size`.
    """
    rank, num_replicas = place(trainer)
    # A run that overfits some batches must meet the same ones in every epoch.
    shuffle = shuffle and not getattr(trainer, "overfit_batches", 0)
    batches_per_step = getattr(trainer, "accumulate_grad_batches", 1)
    sampler = TrainBatches(len(dataset), batch_size, rank, num_replicas, seed, shuffle, batches_per_step, is_typed)
    limit = getattr(trainer, "limit_train_batches", None)
    if isinstance(limit, float) and limit == 1 and (told := sampler.told_of_left_out()):  # else less was asked for
        notice(told)
    copies = None
    if prefetch_to_device and trainer is not None and trainer.strategy.root_device.type == "cuda":
        copies = CudaCopies(trainer.strategy.root_device)
        arguments["pin_memory"] = True
    return _TrainLoader(
        _Batches(dataset, collate_fn, arguments.get("num_workers", 0)),
        sampler,
        lambda: _batches_done(trainer),
        lambda: _goes_round(trainer),
        copies,
        **arguments,
    )


def evaluation_loader(
    dataset: MapDataset,
    collate_fn: CollateFn,
    batch_size: int,
    trainer: L.Trainer | None,
    name: str = "the set",
    **arguments: Any,
) -> DataLoader[Any]:
    """Every sample exactly once over all ranks; see `EvaluationBatches`."""
    sampler = EvaluationBatches(len(dataset), batch_size, *place(trainer), name)
    arguments["worker_init_fn"] = partial(start_worker, arguments.get("worker_init_fn"))
    batches = _Batches(dataset, collate_fn, arguments.get("num_workers", 0))
    return _Loader(batches, sampler=sampler, batch_size=None, **arguments)


def shares_evenly(loaders: Any) -> bool:
    """Whether all ranks get equally many batches of these loaders (nested lists and dicts of them)."""
    found: list[bool] = []
    apply_to_collection(loaders, DataLoader, lambda loader: found.append(isinstance(loader, _Loader)))
    return all(found)


def is_resumable(loaders: Any) -> bool:
    """Whether training can go on inside an epoch: all loaders (nested lists and dicts of them) find their place."""
    found: list[bool] = []
    apply_to_collection(loaders, DataLoader, lambda loader: found.append(isinstance(loader, _Stateful)))
    return bool(found) and all(found)


def place(trainer: L.Trainer | None) -> tuple[int, int]:
    """Rank and number of the ranks that share the data; ranks that split one model read the same data."""
    # Strategies for a single device have no such attribute.
    kwargs = getattr(trainer.strategy, "distributed_sampler_kwargs", None) if trainer is not None else None
    return (kwargs["rank"], kwargs["num_replicas"]) if kwargs else (0, 1)


def _batches_done(trainer: L.Trainer | None) -> int:
    """Batches of the epoch that the trainer has behind it: above 0 when a run resumes inside an epoch."""
    if trainer is None or not trainer.training:
        return 0
    epochs: Any = trainer.fit_loop.epoch_progress.current
    if epochs.ready == epochs.processed:
        return 0  # between two epochs
    return trainer.fit_loop.epoch_loop.batch_progress.current.ready


def _goes_round(trainer: L.Trainer | None) -> bool:
    """Whether a loader begins again where one beside it is longer; else it is at its end."""
    combined = trainer.fit_loop._combined_loader if trainer is not None else None
    return combined is not None and combined._mode == "max_size_cycle"


class TrainingBatch(NamedTuple):
    """Which samples a batch holds, and what its random numbers are drawn from.

    Attributes:
        indices: (B,) int64.
        seed: Of the batch; depends on the run's seed, the epoch, the rank and the batch alone.
        epoch_seed: From which each sample gets a seed, whatever the rank.
    """

    indices: Tensor
    seed: int
    epoch_seed: int


class _Batches(Dataset[Any]):
    """A dataset whose items are batches, found by the indices of their samples.

    With a seed as well, a worker draws random numbers of the batch's own: one of a resumed run has not drawn what the
    interrupted one had drawn before.

    Attributes:
        reading: What each worker is reading, to be told if it dies: (workers, 17), in memory that the processes share.
            Sample indices, then -1; last the worker's process id.
    """

    def __init__(self, samples: MapDataset, collate_fn: Callable[[list[Any]], Any], num_workers: int) -> None:
        self.samples = samples
        self.collate_fn = collate_fn
        self.reading = torch.full((num_workers, 17), -1).share_memory_() if num_workers else None  # type: ignore[no-untyped-call]
        if num_workers:
            READ.add(self)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, place: Tensor | TrainingBatch) -> Any:
        indices, seed, epoch_seed = place if isinstance(place, TrainingBatch) else (place, None, None)
        worker = get_worker_info()
        if worker is not None and seed is not None:
            torch.default_generator.manual_seed(seed)
            np.random.seed(seed % 2**32)
            random.seed(seed)
        note = np.zeros(17, np.int64) if worker is None or self.reading is None else self.reading[worker.id].numpy()
        noted = note[:16]
        noted[:] = -1
        noted[: len(indices)] = indices[:16]
        note[16] = os.getpid()
        try:
            if epoch_seed is not None and hasattr(self.samples, "getitems_in_training"):
                fetched = self.samples.getitems_in_training(indices, sample_seeds(epoch_seed, indices))
            elif hasattr(self.samples, "__getitems__"):
                fetched = self.samples.__getitems__(indices.tolist())  # as torch's own loader does
            else:
                fetched = []
                noted[1:] = -1
                for index in indices.tolist():
                    noted[0] = index
                    fetched.append(self.samples[index])
                noted[: len(indices)] = indices[:16]
            batch = self.collate_fn(fetched) if isinstance(fetched, list) else fetched
        except StopIteration as error:  # which would end the epoch of this rank, and leave the others waiting
            raise RuntimeError(
                f"StopIteration was raised while {_named(noted)} of {type(self.samples).__name__} was read: only an "
                "iterator may raise it"
            ) from error
        except Exception as error:
            error.add_note(f"This happened while {_named(noted)} of {type(self.samples).__name__} was read.")
            raise
        noted[:] = -1
        return batch

    def read_by(self, process_ids: set[int]) -> str:
        """See `project.data.workers.Read`."""
        for *noted, process_id in [] if self.reading is None else self.reading.tolist():
            if process_id in process_ids and noted[0] >= 0:
                return f" while {_named(noted)} of {type(self.samples).__name__} was read"
        return ""


class _Loader(DataLoader[Any]):
    """A loader whose workers end with this process."""

    # No constructor of its own: Lightning makes another loader of the same arguments for predictions.

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        iterator = super().__iter__()
        if self.num_workers:
            end_workers_at_exit(os.getpid())  # a fork starts without what its parent has registered
        return iterator

    def _get_iterator(self) -> _BaseDataLoaderIter:
        if self.num_workers == 0:
            return super()._get_iterator()
        self.check_worker_number_rationality()
        return WorkersIterator(self)


class _TrainLoader(_Loader):
    """A loader that starts to fetch when it is asked for the first batch, not when its iterator is made.

    Lightning makes the first iterator before it tells the sampler the epoch, and before a resumed run knows
    its position. Workers would fetch the wrong batches ahead.
    """

    sampler: TrainBatches

    def __init__(
        self,
        dataset: _Batches,
        sampler: TrainBatches,
        batches_done: Callable[[], int],
        goes_round: Callable[[], bool],
        copies: Copies[Any] | None = None,
        **arguments: Any,
    ) -> None:
        arguments["worker_init_fn"] = partial(start_worker, arguments.get("worker_init_fn"))
        super().__init__(dataset, sampler=sampler, batch_size=None, generator=torch.Generator(), **arguments)
        self.batches_done = batches_done
        self.goes_round = goes_round
        self.copies = copies
        self._read = (-1, 0)  # an epoch, and how many times this loader has been read to its end in it

    @property
    def _index_sampler(self) -> Any:
        return _Seeded(self.sampler)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        done, whole = self.batches_done(), len(self.sampler)
        epoch, times = self._read
        if done and epoch == self.sampler.epoch:
            done = times * whole  # Lightning's counter lags behind where it fetches ahead
        elif done >= whole and not self.goes_round():
            return
        self.sampler.first_batch = done
        self.generator.manual_seed(_epoch_seed(self.sampler))  # of the workers, until they get their first batch
        batches = super().__iter__()
        yield from batches if self.copies is None else ahead(batches, self.copies)
        self._read = (self.sampler.epoch, done // whole + 1)

    # Lightning calls these two for a run that resumes inside an epoch. Its own counter of batches, which
    # `batches_done` reads, says where; that place must be the same in the data.
    def state_dict(self) -> dict[str, Any]:
        return self.sampler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.batches_done():
            self.sampler.check(state_dict)


class _Seeded:
    """The batches of an epoch with their seeds."""

    def __init__(self, sampler: TrainBatches) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[TrainingBatch]:
        first, of_all_ranks = _epoch_seed(self.sampler), _epoch_seed(self.sampler, "samples")
        for number, indices in enumerate(self.sampler, self.sampler.first_batch):
            yield TrainingBatch(indices, first + number, of_all_ranks)


def _epoch_seed(sampler: TrainBatches, of: str | None = None) -> int:
    """By default of the sampler's rank."""
    return random.Random(f"{sampler.order_key}/{of or sampler.rank}").getrandbits(62)


def _named(noted: NDArray[np.int64] | list[int]) -> str:
    indices = [int(index) for index in noted if index >= 0]
    listed = ", ".join(map(str, indices)) + (", ..." if len(indices) == len(noted) else "")
    return f"one of the samples {listed}" if len(indices) > 1 else f"sample {listed}"
