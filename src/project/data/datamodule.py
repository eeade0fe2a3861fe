"""The data module to subclass: you say what the samples are, it shares them over ranks and workers."""

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from project.data.sampler import EvaluationBatches, TrainBatches

SPLITS = ("train", "val", "test")


class MapDataset(Protocol):
    """Samples by index. With `__getitems__` as well, a batch is fetched in one call."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class TensorDataset(Dataset[dict[str, Tensor]]):
    """Samples held in memory, as one tensor (N, ...) per field; a batch is one indexing operation per field.

    Raises:
        ValueError: The tensors differ in their first dimension.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        lengths = {name: len(tensor) for name, tensor in tensors.items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"a dataset needs tensors of one length, these have {lengths}")
        self.tensors = dict(tensors)
        self.length = next(iter(lengths.values()))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: tensor[index] for name, tensor in self.tensors.items()}

    def __getitems__(self, indices: Tensor) -> dict[str, Tensor]:
        return {name: tensor[indices] for name, tensor in self.tensors.items()}


class DataModule(L.LightningDataModule):
    """Turns `train_set`, `val_set` and `test_set`, which a subclass sets in `setup`, into loaders.

    Args:
        batch_size: Global batch size; the ranks share it, so that a run is the same on any number of devices.
        num_workers: Processes per rank that fetch batches; 0 fetches them in the training process.
        pin_memory: Copy batches to page-locked memory, from which a GPU reads faster.
        prefetch_factor: Batches that each worker fetches ahead; torch's default is 2.
        seed: Determines the order of the training samples and the random state of the workers.
        shuffle: A new order of the training samples in each epoch; else the order of the dataset.
        predict_split: The split that predictions are made for: train, val or test.

    A dataset that has `__getitems__` is given a whole batch's indices, (B,) int64, and returns the finished
    batch or, as torch's `Subset` does, the list of its samples. Samples, listed or fetched one by one, go
    through `collate_fn`, which a subclass may replace.

    Raises:
        ValueError: An argument is out of range.
    """

    train_set: MapDataset | None = None
    val_set: MapDataset | None = None
    test_set: MapDataset | None = None
    collate_fn: Callable[[list[Any]], Any] = staticmethod(default_collate)

    def __init__(
        self,
        batch_size: int = 64,
        num_workers: int = 0,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        predict_split: str = "test",
    ) -> None:
        super().__init__()
        if batch_size < 1:
            raise ValueError(f"data.batch_size={batch_size} must be at least 1: type data.batch_size=64")
        if num_workers < 0:
            raise ValueError(f"data.num_workers={num_workers} must not be negative: type data.num_workers=0")
        if predict_split not in SPLITS:
            raise ValueError(f"data.predict_split={predict_split} is unknown: type one of {', '.join(SPLITS)}")
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        self.prefetch_factor = prefetch_factor
        self.seed = seed
        self.shuffle = shuffle
        self.predict_split = predict_split

    def train_dataloader(self) -> DataLoader[Any]:
        dataset = self._dataset("train")
        rank, num_replicas = self._place()
        # A run that overfits some batches must meet the same ones in every epoch.
        shuffle = self.shuffle and not getattr(self.trainer, "overfit_batches", 0)
        sampler = TrainBatches(len(dataset), self.batch_size, rank, num_replicas, self.seed, shuffle)
        return _TrainLoader(
            _Batches(dataset, self.collate_fn),
            sampler,
            self._batches_done,
            persistent_workers=self.num_workers > 0,
            **self._loader_arguments(),
        )

    def val_dataloader(self) -> DataLoader[Any]:
        return self._evaluation_loader("val")

    def test_dataloader(self) -> DataLoader[Any]:
        return self._evaluation_loader("test")

    def predict_dataloader(self) -> DataLoader[Any]:
        return self._evaluation_loader(self.predict_split)

    def _evaluation_loader(self, split: str) -> DataLoader[Any]:
        dataset = self._dataset(split)
        sampler = EvaluationBatches(len(dataset), self.batch_size, *self._place())
        batches = _Batches(dataset, self.collate_fn)
        return DataLoader(batches, sampler=sampler, batch_size=None, **self._loader_arguments())

    def _loader_arguments(self) -> dict[str, Any]:
        return {
            "num_workers": self.num_workers,
            "pin_memory": self.pin_memory,
            "prefetch_factor": self.prefetch_factor if self.num_workers else None,
        }

    def _dataset(self, split: str) -> MapDataset:
        dataset: MapDataset | None = getattr(self, f"{split}_set")
        if dataset is None:
            raise ValueError(f"{type(self).__name__}.setup must set self.{split}_set before its loader is used")
        return dataset

    def _place(self) -> tuple[int, int]:
        """Rank and number of the ranks that share the data; ranks that split one model read the same data."""
        if self.trainer is None:
            return 0, 1
        # Strategies for a single device have no such attribute.
        place = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None) or {}
        return place.get("rank", 0), place.get("num_replicas", 1)

    def _batches_done(self) -> int:
        """Batches of the epoch that the trainer has behind it: above 0 when a run resumes inside an epoch."""
        if self.trainer is None or not self.trainer.training:
            return 0
        return self.trainer.fit_loop.epoch_loop.batch_progress.current.ready


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
