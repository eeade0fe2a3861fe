"""Data modules of images: one size, bytes until the batch is complete, then standardized floats."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from project.data.augment import Augmentation, augmented
from project.data.datamodule import DataModule

Batch = dict[str, Tensor]
Read = Callable[[Tensor], Tensor]


class ImageDataset(Dataset[Batch]):
    """Images that are read and standardized by whole batches and, in training, augmented.

    Args:
        read: From indices (B,) to images (B, C, H, W) uint8.
        label: (N,) int64; of -1 where images have none, which their batches then have neither.
        mean: Of each channel, black being 0 and white 1.
        std: Likewise.
        augmentations: What training batches go through before they are standardized.
    """

    def __init__(
        self,
        read: Read,
        label: Tensor,
        mean: Sequence[float],
        std: Sequence[float],
        augmentations: Sequence[Augmentation] = (),
    ) -> None:
        self.read = read
        self.label = label
        # (x / 255 - mean) / std, in one multiplication and one subtraction.
        self.scale = 1 / (255 * torch.tensor(std)).view(-1, 1, 1)
        self.shift = (torch.tensor(mean) / torch.tensor(std)).view(-1, 1, 1)
        self.augmentations = list(augmentations)

    def __len__(self) -> int:
        return len(self.label)

    def __getitem__(self, index: int) -> Batch:
        return {name: tensor[0] for name, tensor in self.__getitems__(torch.tensor([index])).items()}

    def __getitems__(self, indices: Sequence[int] | Tensor) -> Batch:
        """`{"image": (B, C, H, W) float32, "label": (B,) int64}` as they are, for evaluation."""
        indices = torch.as_tensor(indices)
        return self._batch(self.read(indices), indices)

    def getitems_in_training(self, indices: Tensor, seeds: Tensor) -> Batch:
        """The same after augmentation; `seeds` (B,) int64 decide what becomes of each image."""
        return self._batch(augmented(self.read(indices), seeds, self.augmentations), indices)

    def _batch(self, images: Tensor, indices: Tensor) -> Batch:
        batch = {"image": images * self.scale - self.shift}
        label = self.label[indices]
        return batch if bool((label < 0).any()) else batch | {"label": label}


class ImageDataModule(DataModule):
    """What data modules of images have in common.

    Batch: `{"image": (B, C, H, W) float32, "label": (B,) int64}`.

    Args:
        image_shape: (channels, height, width); 1 channel is grey, 3 are red, green and blue.
        mean: Of each channel, black being 0 and white 1; images are standardized by it.
        std: Likewise.
        augment: Named augmentations of the training images, called in their order; see `augment.augmented`.
        loading: Arguments of `DataModule`.

    Raises:
        ValueError: Shape, mean and standard deviation don't fit each other.
    """

    def __init__(
        self,
        image_shape: Sequence[int],
        mean: Sequence[float],
        std: Sequence[float],
        augment: Mapping[str, Augmentation | None] | None = None,
        **loading: Any,
    ) -> None:
        super().__init__(**loading)
        if len(image_shape) != 3 or image_shape[0] not in (1, 3) or min(image_shape) < 1:
            raise ValueError(
                f"data.image_shape={list(image_shape)} must be 1 or 3 channels, height and width: "
                "type data.image_shape=[3,64,64]"
            )
        channels, height, width = image_shape
        if len(mean) != channels or len(std) != channels or min(std) <= 0:
            halves, quarters = (",".join([number] * channels) for number in ("0.5", "0.25"))
            raise ValueError(
                f"data.mean={list(mean)} and data.std={list(std)} must have a number for each of {channels} channels, "
                f"those of std above 0: type data.mean=[{halves}] data.std=[{quarters}]"
            )
        self.image_shape = (channels, height, width)
        self.mean = list(mean)
        self.std = list(std)
        self.augmentations = [step for step in (augment or {}).values() if step is not None]

    def dataset(self, read: Read, label: Tensor, training: bool = False) -> ImageDataset:
        """Images by `read` with their labels (N,); those to train on are augmented."""
        return ImageDataset(read, label, self.mean, self.std, self.augmentations if training else ())
