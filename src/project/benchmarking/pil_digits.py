"""The digits as image files usually reach a net: one by one, a PIL image, its transforms, then the collation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from project.data import DigitsDataModule, TensorDataset


class PILDigits(Dataset[tuple[Tensor, int]]):
    """Grey 8-bit images; a sample is ``((1, 8, 8) float32, label)``, scaled and standardized when it is asked for."""

    def __init__(self, images: np.ndarray[Any, Any], labels: list[int]) -> None:
        self.images = images  # (N, 8, 8) uint8
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = Image.fromarray(self.images[index])
        return normalize(to_tensor(image)), self.labels[index]


def to_tensor(image: Image.Image) -> Tensor:
    """(H, W) of 0 to 255 becomes (1, H, W) of 0 to 1."""
    return torch.from_numpy(np.array(image)).unsqueeze(0).contiguous().float().div(255)


def normalize(image: Tensor) -> Tensor:
    return image.clone().sub_(0.3).div_(0.37)


def digits_loaders(data: Mapping[str, Any]) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Loaders of the training and validation images of ``conf/data/digits.yaml``, with torch's own sampler."""
    arguments = {name: value for name, value in data.items() if name != "_target_"}
    digits = DigitsDataModule(**arguments)
    digits.setup("fit")
    sets = []
    for split in (digits.train_set, digits.val_set):
        assert isinstance(split, TensorDataset)
        pixels = split.tensors["image"].squeeze(1)
        grey = (pixels - pixels.min()) / (pixels.max() - pixels.min()) * 255
        sets.append(PILDigits(grey.to(torch.uint8).numpy(), split.tensors["label"].tolist()))
    train_set, val_set = sets
    # The last incomplete batch is dropped, as the template does: both sides take equally many steps.
    train = DataLoader(train_set, batch_size=digits.batch_size, shuffle=True, drop_last=True)
    return train, DataLoader(val_set, batch_size=digits.batch_size)
