"""A folder of pictures, whatever their formats and sizes: a folder for each class."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from project.data.images import ImageDataModule
from project.data.loaders import SampleError
from project.notices import notice

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
SPLIT_FOLDERS = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}
NEEDED_IN = {"validate": ("val",), "test": ("test",)}  # else all

Listing = list[tuple[Path, int]]  # a picture and its class, -1 for none


class ImageFolder(ImageDataModule):
    """Pictures that lie in a folder for each class, decoded, turned upright and cut to one size as they are needed.

    Either `folder/<class>/...`, from which validation and test are drawn by `seed`, the same share of each class; or
    `folder/train/<class>/...`, beside which `val` and `test` may lie. What is not there is drawn from the rest.
    Pictures may lie deeper in their class's folder; hidden files, and files that are no pictures by their names, are
    left out. For predictions `folder` may also hold pictures alone: they are read in the order of their names.

    A picture is scaled until it covers `image_shape`, and what projects on two sides is cut off. Transparent parts
    become white. Pixels are the same whatever is installed: Pillow decodes and scales.

    Args:
        folder: See above.
        image_shape: (channels, height, width) that the net gets; 1 channel is grey, 3 are red, green and blue.
        classes: Names of the class folders, label 0 first; None takes those that are there, in alphabetical order.
            Configs find them before the run, and a checkpoint keeps them.
        num_classes: Their number; None takes what is there.
        val_fraction: Share that is kept for validation where there is no folder for it.
        test_fraction: Share that is kept for the test, likewise.
        images: Arguments of `ImageDataModule`.

    Raises:
        ValueError: There is no such folder, or it has another form, too few pictures or other classes.
        SampleError: A file is damaged; raised when it is its turn.
    """

    def __init__(
        self,
        folder: str,
        image_shape: Sequence[int] = (3, 64, 64),
        classes: Sequence[str] | None = None,
        num_classes: int | None = None,
        val_fraction: float = 0.15,
        test_fraction: float = 0.15,
        **images: Any,
    ) -> None:
        super().__init__(image_shape, **images)
        if min(val_fraction, test_fraction) < 0 or val_fraction + test_fraction > 1:
            raise ValueError(
                f"data.val_fraction={val_fraction} and data.test_fraction={test_fraction} must not be negative, nor "
                "more than 1 together: type data.val_fraction=0.15 data.test_fraction=0.15"
            )
        self.folder = Path(folder).expanduser()
        self.classes = list(classes) if classes is not None else None
        if num_classes is not None and self.classes is not None and num_classes != len(self.classes):
            raise ValueError(
                f"data.num_classes={num_classes} but data.classes names {len(self.classes)}: leave data.num_classes out"
            )
        self.num_classes = num_classes
        self.fractions = {"val": val_fraction, "test": test_fraction}

    def facts(self) -> dict[str, Any]:
        """What the net must know of the data, found by looking at the folder: `classes` and `num_classes`."""
        classes = self.classes or self._class_folders()
        folders = self._split_folders()
        for split, fraction in self.fractions.items():
            if split not in folders and not fraction:
                raise ValueError(
                    f"data.{split}_fraction=0 leaves no picture of {self.folder} for {split}: add a folder {split}, or "
                    f"type data.{split}_fraction=0.15"
                )
        for name in classes:
            _check_not_empty(folders["train"] / name)
        return {"classes": classes, "num_classes": len(classes)}

    def sample_columns(self, indices: Sequence[int]) -> dict[str, list[Any]]:
        """What tells the predicted samples apart: their files, relative to `folder`."""
        paths = getattr(self, f"{self.predict_split}_set").read.paths
        return {"file": [Path(path).relative_to(self.folder).as_posix() for path in paths[list(indices)]]}

    def setup(self, stage: str | None = None) -> None:
        if self.train_set is None:
            self._list_all(without_labels=stage == "predict")
        for split in [self.predict_split] if stage == "predict" else NEEDED_IN.get(stage or "", SPLIT_FOLDERS):
            if not len(getattr(self, f"{split}_set")):
                others = "val_fraction and data.test_fraction" if split == "train" else f"{split}_fraction"
                raise ValueError(
                    f"no picture in {self.folder} is for {split}: add some, or type another share for data.{others}"
                )

    def _list_all(self, without_labels: bool) -> None:
        if without_labels and self.folder.is_dir() and not _folders(self.folder):
            every: Listing = [(path, -1) for path in _pictures(self.folder)]
            self.train_set = self.val_set = self.test_set = self._dataset_of(every)
            return
        has_folders = bool(_folders(self._split_folders()["train"]))  # else nothing says what a picture shows
        classes = self.classes if self.classes and has_folders else self._class_folders()
        if self.num_classes not in (None, len(classes)):
            raise ValueError(
                f"data.num_classes={self.num_classes} but {self.folder} has {len(classes)} classes: "
                f"type data.num_classes={len(classes)}"
            )
        listings = self._listings(classes)
        self._tell(listings, classes)
        for split, listing in listings.items():
            setattr(self, f"{split}_set", self._dataset_of(listing, training=split == "train"))

    def _tell(self, listings: dict[str, Listing], classes: Sequence[str]) -> None:
        """Say what was found, which splits are drawn though others have a folder, and which classes a split lacks."""
        folders = self._split_folders()
        counts = ", ".join(f"{len(listing):,} for {split}" for split, listing in listings.items())
        notice(f"{self.folder} holds pictures of {len(classes)} classes: {counts}")
        for split, listing in listings.items():
            if split not in folders and folders["train"] != self.folder:
                notice(
                    f"{self.folder} has no folder {split}: {len(listing)} pictures of {folders['train'].name} are kept "
                    f"for it (data.{split}_fraction={self.fractions[split]})"
                )
            there = {label for _, label in listing}
            if listing and (lacking := [name for label, name in enumerate(classes) if label not in there]):
                notice(f"No picture for {split} of the classes {', '.join(lacking)}")

    def _listings(self, classes: Sequence[str]) -> dict[str, Listing]:
        """The pictures of each split."""
        folders = self._split_folders()
        listings = {split: _listing(folder, classes) for split, folder in folders.items()}
        generator = torch.Generator().manual_seed(self.seed)
        drawn = [split for split in self.fractions if split not in folders]
        kept: Listing = []
        for _, samples in groupby(listings["train"], key=lambda sample: sample[1]):
            own = list(samples)
            order = torch.randperm(len(own), generator=generator).tolist()
            for split in drawn:
                count = round(self.fractions[split] * len(own))
                listings.setdefault(split, []).extend(own[place] for place in sorted(order[:count]))
                order = order[count:]
            kept += [own[place] for place in sorted(order)]
        return {split: listings.get(split, []) for split in SPLIT_FOLDERS} | {"train": kept}

    def _split_folders(self) -> dict[str, Path]:
        """The folders of the splits that have one; the whole folder is that of `train` where there are none."""
        if not self.folder.is_dir():
            raise ValueError(f"data.folder={self.folder} is no folder: type data.folder= with one that is")
        found = {
            split: self.folder / name
            for split, names in SPLIT_FOLDERS.items()
            for name in names
            if (self.folder / name).is_dir()
        }
        return found if "train" in found else {"train": self.folder}

    def _class_folders(self) -> list[str]:
        folder = self._split_folders()["train"]
        classes = _folders(folder)
        if len(classes) < 2:
            found = f"the folder {classes[0]} alone" if classes else "no folders"
            raise ValueError(
                f"{folder} holds {found}, but each class needs a folder with its pictures: "
                f"make {folder / 'NAME'} for each of them"
            )
        return classes

    def _dataset_of(self, listing: Listing, training: bool = False) -> Any:
        paths = np.array([str(path) for path, _ in listing])  # one block of memory, which workers don't copy
        label = torch.tensor([label for _, label in listing], dtype=torch.int64)
        return self.dataset(_Files(paths, self.image_shape), label, training)


class _Files:
    """Pictures by their paths (N,), all brought to one shape."""

    def __init__(self, paths: np.ndarray[Any, Any], image_shape: tuple[int, int, int]) -> None:
        self.paths = paths
        self.image_shape = image_shape

    def __call__(self, indices: Tensor) -> Tensor:
        images = torch.empty(len(indices), *self.image_shape, dtype=torch.uint8)
        for place, path in enumerate(self.paths[indices.numpy()]):
            images[place] = decode(Path(path), self.image_shape)
        return images


def decode(path: Path, image_shape: tuple[int, int, int]) -> Tensor:
    """A picture as (C, H, W) uint8: upright, scaled to cover the shape, its middle.

    Raises:
        SampleError: The file is damaged or no picture.
    """
    channels, height, width = image_shape
    with _named(path), Image.open(path) as opened:
        # JPEG is decoded at a fraction of its size where that suffices.
        opened.draft("L" if channels == 1 else "RGB", (width, height))
        picture = _flat(ImageOps.exif_transpose(opened)).convert("L" if channels == 1 else "RGB")
        fitted = ImageOps.fit(picture, (width, height), Image.Resampling.BILINEAR)
        pixels = torch.from_numpy(np.array(fitted))  # (H, W) or (H, W, 3)
    return pixels.view(height, width, channels).permute(2, 0, 1)


def _flat(picture: Image.Image) -> Image.Image:
    """Without transparency, and with 8 bits a channel."""
    if picture.mode.startswith("I"):  # 16 bits of grey, which conversion would cut off at 255
        return Image.fromarray((np.asarray(picture).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
    if picture.has_transparency_data:
        layers = picture.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layers.size, "white"), layers)
    return picture


@contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:  # a damaged file can make a decoder raise anything
        reason = "it is no picture" if isinstance(error, UnidentifiedImageError) else str(error)
        raise SampleError(f"{path} can't be read ({reason}): mend it, or take it out of the folder") from error


def _folders(folder: Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))


def _listing(folder: Path, classes: Sequence[str]) -> Listing:
    """All pictures of a split, class by class."""
    unknown = sorted(set(_folders(folder)) - set(classes))
    if unknown:
        raise ValueError(
            f"{folder} holds the folder {unknown[0]}, which is none of the classes {', '.join(classes)}: take it out, "
            "or train with it"
        )
    listing: Listing = []
    for label, name in enumerate(classes):
        _check_not_empty(folder / name)
        pictures = _pictures(folder / name)
        listing += [(path, label) for path in pictures]
    return listing


def _check_not_empty(folder: Path) -> None:
    if folder.is_dir() and next(_walk(folder), None) is None:
        raise ValueError(f"{folder} holds no picture ({', '.join(SUFFIXES)}): add some, or take it away")


def _pictures(folder: Path) -> list[Path]:
    return sorted(_walk(folder))


def _walk(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (
            Path(parent, name) for name in names if name.lower().endswith(SUFFIXES) and not name.startswith(".")
        )
