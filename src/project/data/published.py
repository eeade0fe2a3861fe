"""Image data sets that everyone compares with: downloaded once, checked, kept as arrays that all ranks share."""

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from project.data.images import ImageDataModule
from project.downloads import RemoteFile, cache_folder, fetch, one_at_a_time
from project.files import beside

Arrays = tuple[NDArray[np.uint8], NDArray[np.int64]]


class PublishedImages(ImageDataModule):
    """Training images, of which a share drawn by `seed` is kept for validation, and the published test images.

    One process of a host downloads and unpacks them; where there is no network, the error says which file to put where.
    A subclass says which files there are and how they are read.

    Args:
        image_shape: Handed on to the net; only the data's own is true.
        num_classes: Likewise.
        folder: Where the files are kept; None takes `~/.cache/project/<title>`, or `$XDG_CACHE_HOME/project/<title>`.
        val_fraction: Share of the training images that is kept for validation.
        images: Arguments of `ImageDataModule`.

    Raises:
        ValueError: A fact is not that of the data, or the share leaves nothing.
    """

    title: ClassVar[str]
    shape: ClassVar[tuple[int, int, int]]
    classes: ClassVar[int]
    files: ClassVar[Sequence[RemoteFile]]

    def __init__(
        self,
        image_shape: Sequence[int],
        num_classes: int,
        folder: str | None = None,
        val_fraction: float = 0.1,
        **images: Any,
    ) -> None:
        if tuple(image_shape) != self.shape:
            raise ValueError(
                f"data.image_shape={list(image_shape)} is not the shape of {self.title}: "
                f"type data.image_shape=[{','.join(map(str, self.shape))}]"
            )
        if num_classes != self.classes:
            raise ValueError(
                f"data.num_classes={num_classes} but {self.title} has {self.classes}: "
                f"type data.num_classes={self.classes}"
            )
        if not 0 < val_fraction < 1:
            raise ValueError(f"data.val_fraction={val_fraction} must be between 0 and 1: type data.val_fraction=0.1")
        super().__init__(image_shape, **images)
        self.num_classes = num_classes
        self.folder = cache_folder(self.title) if folder is None else Path(folder).expanduser()
        self.val_fraction = val_fraction

    @abstractmethod
    def read(self, paths: Sequence[Path], split: str) -> Arrays:
        """Images (N, C, H, W) uint8 and labels (N,) of train or test, out of the downloaded `files`.

        Raises:
            ValueError: A file is not what it should be.
        """

    def prepare_data(self) -> None:
        """Called by one rank of each host."""
        if all(path.is_file() for path in self._arrays().values()):
            return
        paths = fetch(self.files, self.folder)
        with one_at_a_time(self.folder):
            for split in ("train", "test"):
                images, labels = self.read(paths, split)
                for kind, array in (("images", images), ("labels", labels)):
                    with beside(self._arrays()[split, kind]) as written, written.open("wb") as file:
                        np.save(file, array)

    def setup(self, stage: str | None = None) -> None:
        if self.train_set is not None:
            return
        train, label = self._load("train")
        order = torch.randperm(len(label), generator=torch.Generator().manual_seed(self.seed))
        held_out = round(self.val_fraction * len(order))
        if not 0 < held_out < len(order):
            raise ValueError(
                f"data.val_fraction={self.val_fraction} of {len(order)} training images leaves one part empty: "
                "type data.val_fraction=0.1"
            )
        # In ascending order, which reads the file from its beginning to its end.
        val, kept = order[:held_out].sort().values, order[held_out:].sort().values
        self.train_set = self.dataset(_Rows(train, kept), label[kept], training=True)
        self.val_set = self.dataset(_Rows(train, val), label[val])
        test, label = self._load("test")
        self.test_set = self.dataset(_Rows(test, torch.arange(len(label))), label)

    def _arrays(self) -> dict[tuple[str, str], Path]:
        pairs = [(split, kind) for split in ("train", "test") for kind in ("images", "labels")]
        return {(split, kind): self.folder / f"{split}_{kind}.npy" for split, kind in pairs}

    def _load(self, split: str) -> tuple[Tensor, Tensor]:
        # Mapped: the ranks of a host share one copy. Changes, which nobody makes, would stay in this process.
        images = np.load(self._arrays()[split, "images"], mmap_mode="c")
        return torch.from_numpy(images), torch.from_numpy(np.load(self._arrays()[split, "labels"]))


class _Rows:
    """Images of one split, as rows of an array that holds them all."""

    def __init__(self, images: Tensor, rows: Tensor) -> None:
        self.images = images
        self.rows = rows

    def __call__(self, indices: Tensor) -> Tensor:
        return self.images[self.rows[indices]]
