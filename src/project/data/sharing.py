"""Any LightningDataModule's loaders, shared over the ranks as this package's own data modules do it."""

import copy
import inspect
import random
from collections.abc import Callable, Sized
from itertools import count
from typing import Any, cast

import lightning as L
from lightning.pytorch.utilities import CombinedLoader
from lightning_utilities.core.apply_func import apply_to_collection
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from project.data.datamodule import DataModule
from project.data.loaders import MapDataset, evaluation_loader, place, train_loader


def share(datamodule: L.LightningDataModule, seed: int) -> None:
    """Make a data module's plain loaders equal under any number of ranks; ours are so already.

    Their ``batch_size`` becomes the global one, the order of training depends on ``seed`` and the epoch alone, a
    loader that does not shuffle is not shuffled, and evaluation reads every sample exactly once. (Lightning's own
    sharing multiplies the batch by the ranks, shuffles every training loader, and pads in evaluation.) So it is with
    each of several, in lists, dicts and Lightning's ``CombinedLoader``.

    A loader with a sampler of the user's own is left as it is on one rank, and where that sampler is a
    ``DistributedSampler``.
    """
    if isinstance(datamodule, DataModule):
        return
    # A subclass made for this one object, with just the hooks that it has: Lightning looks for them on the class.
    own = type(datamodule)
    hooks = {name: _shared(name) for name in HOOKS if getattr(own, name) is not getattr(L.LightningDataModule, name)}
    datamodule.__class__ = type(own.__name__, (_Shared, own), {"_seed": seed, **hooks})


HOOKS = ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader")


def _shared(hook: str) -> Callable[[L.LightningDataModule], Any]:
    def dataloader(self: Any) -> Any:
        loaders = getattr(super(type(self), self), hook)()
        if hook != HOOKS[0]:
            return _each(loaders, lambda loader: self._evaluation(loader, hook))
        numbers = count()
        return _each(loaders, lambda loader: self._train(loader, next(numbers)))

    return dataloader


def _each(loaders: Any, change: Callable[[DataLoader[Any]], DataLoader[Any]]) -> Any:
    """Changes each loader in nested lists, dicts and Lightning's combined loaders."""

    def changed(loader: DataLoader[Any] | CombinedLoader) -> Any:
        if isinstance(loader, DataLoader):
            return change(loader)
        combined = copy.copy(loader)  # the module may hold on to its own
        combined.flattened = [_each(part, change) for part in loader.flattened]
        return combined

    return apply_to_collection(loaders, (DataLoader, CombinedLoader), changed)


class _Shared(L.LightningDataModule):
    _seed: int

    def _train(self, loader: DataLoader[Any], number: int) -> DataLoader[Any]:
        """`number`: of the loader among those that training reads together."""
        batches = self._plain_batches(loader)
        if batches is None:
            return loader
        shuffle = isinstance(batches.sampler, RandomSampler)
        arguments = _arguments(loader) | {"persistent_workers": loader.persistent_workers}
        arguments["is_typed"] = "batch_size" in inspect.signature(type(self)).parameters
        dataset = cast("MapDataset", loader.dataset)
        # With one seed, the samples of two loaders of one length would meet in the same pairs in every epoch.
        seed = random.Random(f"{self._seed}/{number}").getrandbits(32) if number else self._seed
        return train_loader(dataset, loader.collate_fn, batches.batch_size, seed, shuffle, self.trainer, **arguments)

    def _evaluation(self, loader: DataLoader[Any], hook: str) -> DataLoader[Any]:
        batches = self._plain_batches(loader)
        if batches is None:
            return loader
        dataset = cast("MapDataset", loader.dataset)
        name = f"the dataset of {type(self).__name__}.{hook}"
        arguments = _arguments(loader)
        return evaluation_loader(dataset, loader.collate_fn, batches.batch_size, self.trainer, name, **arguments)

    def _plain_batches(self, loader: DataLoader[Any]) -> BatchSampler | None:
        """What batches the loader makes, if it is torch's plain one, whose samples can be shared by index.

        Raises:
            ValueError: It is not, and several ranks would each read all of its samples.
        """
        _, num_replicas = place(self.trainer)
        iterable = isinstance(loader.dataset, IterableDataset)
        batches: Any = loader.batch_sampler  # given one, a loader has a sampler that it doesn't use
        plain = (
            not iterable
            and type(batches) is BatchSampler
            and type(batches.sampler) in (RandomSampler, SequentialSampler)
            and getattr(batches.sampler, "replacement", False) is False
            and len(cast("Sized", batches.sampler)) == len(cast("Sized", loader.dataset))
        )
        if plain or num_replicas == 1 or isinstance(loader.sampler, DistributedSampler):
            return batches if plain else None
        if iterable:
            what, remedy = "iterable dataset", "give it __len__ and __getitem__"
        elif batches is None:
            what, remedy = "batch_size=None", "let the dataset return single samples, and give the loader a batch_size"
        elif type(batches) is BatchSampler:
            what = f"sampler {type(batches.sampler).__name__}"
            remedy = "derive the sampler from torch's DistributedSampler and give it to the loader as sampler="
        else:
            what = f"batch_sampler {type(batches).__name__}"
            remedy = "give the loader a batch_size, and a sampler derived from torch's DistributedSampler"
        raise ValueError(
            f"{type(self).__name__}: the {what} of a loader would give each of the {num_replicas} ranks all samples: "
            f"{remedy}, or type trainer.devices=1"
        )


def _arguments(loader: DataLoader[Any]) -> dict[str, Any]:
    names = ("num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "prefetch_factor")
    return {name: getattr(loader, name) for name in names}
