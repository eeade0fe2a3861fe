"""Handwritten digits that ship with scikit-learn: real images without a download."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from project.data.datamodule import DataModule, TensorDataset


class DigitsDataModule(DataModule):
    """1797 grey images of 8x8 pixels, split by `seed` and standardized by the training images' statistics.

    Batch: `{"image": (B, 1, 8, 8) float32, "label": (B,) int64}`.

    Args:
        image_shape: (channels, height, width). Configs hand it on to the net; only (1, 8, 8) is true here.
        num_classes: Handed on likewise; only 10 is true here.
        val_fraction: Share of the samples that is kept for validation.
        test_fraction: Share of the samples that is kept for the test.
        loading: Arguments of `DataModule`.

    Raises:
        ValueError: A fact is not that of the data, or the fractions leave a split empty.
    """

    def __init__(
        self,
        image_shape: Sequence[int] = (1, 8, 8),
        num_classes: int = 10,
        val_fraction: float = 0.15,
        test_fraction: float = 0.15,
        **loading: Any,
    ) -> None:
        super().__init__(**loading)
        if tuple(image_shape) != (1, 8, 8):
            raise ValueError(
                f"data.image_shape={list(image_shape)} is not the shape of the digits: type data.image_shape=[1,8,8]"
            )
        if num_classes != 10:
            raise ValueError(f"data.num_classes={num_classes} but there are ten digits: type data.num_classes=10")
        if min(val_fraction, test_fraction) <= 0 or val_fraction + test_fraction >= 1:
            raise ValueError(
                f"data.val_fraction={val_fraction} and data.test_fraction={test_fraction} must be above 0 "
                "and leave training samples: type data.val_fraction=0.15 data.test_fraction=0.15"
            )
        self.image_shape = (1, 8, 8)
        self.num_classes = num_classes
        self.val_fraction = val_fraction
        self.test_fraction = test_fraction

    def setup(self, stage: str | None = None) -> None:
        if self.train_set is not None:
            return
        rows = torch.from_numpy(read_digits())
        image = rows[:, :-1].float().view(-1, *self.image_shape)
        label = rows[:, -1].long()
        order = torch.randperm(len(label), generator=torch.Generator().manual_seed(self.seed))
        num_val, num_test = round(self.val_fraction * len(order)), round(self.test_fraction * len(order))
        val, test, train = order.tensor_split([num_val, num_val + num_test])
        image = (image - image[train].mean()) / image[train].std()
        self.train_set, self.val_set, self.test_set = (
            TensorDataset({"image": image[split], "label": label[split]}) for split in (train, val, test)
        )


def read_digits() -> np.ndarray[Any, Any]:
    """(1797, 65) float64: 64 pixels of 0 to 16, and the label.

    From the file that `sklearn.datasets.load_digits` reads; to import that would take half a second of a run's start.
    """
    scikit_learn = find_spec("sklearn")
    for folder in (scikit_learn.submodule_search_locations if scikit_learn else None) or ():
        file = Path(folder, "datasets", "data", "digits.csv.gz")
        if file.exists():
            rows: np.ndarray[Any, Any] = np.loadtxt(file, delimiter=",")
            return rows
    from sklearn.datasets import load_digits  # may have its file elsewhere

    digits = load_digits()
    return np.column_stack([digits.data, digits.target])
