"""The data module to subclass: you say what the samples are, it shares them over ranks and workers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from project.data.loaders import MapDataset, evaluation_loader, train_loader

SPLITS = ("train", "val", "test")


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

    def __getitems__(self, indices: Sequence[int] | Tensor) -> dict[str, Tensor]:
        indices = torch.as_tensor(indices)
        return {name: tensor[indices] for name, tensor in self.tensors.items()}


class DataModule(L.LightningDataModule):
    """Turns `train_set`, `val_set` and `test_set`, which a subclass sets in `setup`, into loaders.

    Args:
        batch_size: Global batch size; the ranks share it, so that a run is the same on any number of devices.
        num_workers: Processes per rank that fetch batches; 0 fetches them in the training process.
        pin_memory: Copy batches to page-locked memory, from which a GPU reads faster.
        prefetch_factor: Batches that each worker fetches ahead; torch's default is 2.
        prefetch_to_device: Copy each training batch to a CUDA device, from page-locked memory, while the one before is
            computed on; hooks on a batch before its transfer then find it there. Nothing on other devices.
        seed: Determines the order of the training samples and the random state of the workers.
        shuffle: A new order of the training samples in each epoch; else the order of the dataset.
        predict_split: The split that predictions are made for: train, val or test.

    A dataset that has `__getitems__` is given a whole batch's indices, a list of B, and returns the finished
    batch or, as torch's `Subset` does, the list of its samples. Samples, listed or fetched one by one, go
    through `collate_fn`, which a subclass may replace. In training a dataset that has `getitems_in_training` is
    asked by that; see `loaders.MapDataset`.

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
        prefetch_to_device: bool = False,
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
        self.prefetch_to_device = prefetch_to_device
        self.seed = seed
        self.shuffle = shuffle
        self.predict_split = predict_split

    def train_dataloader(self) -> DataLoader[Any]:
        return train_loader(
            self._dataset("train"),
            self.collate_fn,
            self.batch_size,
            self.seed,
            self.shuffle,
            self.trainer,
            self.prefetch_to_device,
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
        arguments = self._loader_arguments()
        return evaluation_loader(
            dataset, self.collate_fn, self.batch_size, self.trainer, f"the {split} set", **arguments
        )

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
        if isinstance(dataset, IterableDataset):
            raise ValueError(
                f"{type(self).__name__}.{split}_set is an iterable dataset, whose samples can't be shared over ranks: "
                "give it __len__ and __getitem__"
            )
        return dataset
