"""Made-up images of any shape and number, to measure speed and to test without data."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import Dataset

from project.data.datamodule import DataModule

POOL_IMAGES = 1024
POOL_BYTES = 64 * 2**20


class SyntheticImageDataset(Dataset[dict[str, Tensor]]):
    """Class patterns under noise, computed from `seed` and the sample's index alone.

    A sample is the coarse pattern of its class plus two images out of a pool of noise. The pool has as many
    images as fit into 64 MiB, at most 1024: memory does not grow with `length`, and pairs repeat only after
    (pool size) squared samples.

    Args:
        first_index: Index of sample 0, so that splits of one seed share the patterns but not the samples.
        delay_ms: Time that a sample takes to fetch, as from a slow disk.
    """

    def __init__(
        self,
        length: int,
        image_shape: tuple[int, int, int],
        num_classes: int,
        seed: int,
        first_index: int = 0,
        delay_ms: float = 0.0,
    ) -> None:
        self.length = length
        self.num_classes = num_classes
        self.first_index = first_index
        self.delay_ms = delay_ms
        generator = torch.Generator().manual_seed(seed)
        channels, height, width = image_shape
        patterns = torch.randn(num_classes, channels, 4, 4, generator=generator)
        self.patterns = (patterns - patterns.mean()) / patterns.std()
        image_bytes = 4 * channels * height * width
        pool_size = max(2, min(POOL_IMAGES, POOL_BYTES // image_bytes))
        self.noise = torch.randn(pool_size, *image_shape, generator=generator)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: tensor[0] for name, tensor in self.__getitems__(torch.tensor([index])).items()}

    def __getitems__(self, indices: Sequence[int] | Tensor) -> dict[str, Tensor]:
        """`{"image": (B, C, H, W) float32, "label": (B,) int64}`, pixels of mean 0 and variance 1."""
        if self.delay_ms:
            time.sleep(self.delay_ms / 1000 * len(indices))
        indices = torch.as_tensor(indices) + self.first_index
        label = indices % self.num_classes
        pattern = interpolate(self.patterns[label], size=self.noise.shape[-2:])
        first = indices % len(self.noise)
        second = (first + 1 + indices // len(self.noise)) % len(self.noise)
        # The variances are 1, 1/2 and 1/2; the sum's is 2.
        noise = (self.noise[first] + self.noise[second]).mul_(0.5**0.5)
        return {"image": noise.add_(pattern).mul_(0.5**0.5), "label": label}


class SyntheticImages(DataModule):
    """Images whose labels can be learned, with a size, a number and a fetch time of choice.

    Batch: `{"image": (B, C, H, W) float32, "label": (B,) int64}`.

    Args:
        image_shape: (channels, height, width).
        num_classes: Number of labels; the classes are equally frequent.
        length: Training samples.
        val_length: Validation samples.
        test_length: Test samples.
        delay_ms: Time that a sample takes to fetch, as from a slow disk; workers overlap it with training.
        loading: Arguments of `DataModule`.

    Raises:
        ValueError: A number is out of range.
    """

    def __init__(
        self,
        image_shape: Sequence[int] = (3, 32, 32),
        num_classes: int = 10,
        length: int = 4096,
        val_length: int = 512,
        test_length: int = 512,
        delay_ms: float = 0.0,
        **loading: Any,
    ) -> None:
        super().__init__(**loading)
        if len(image_shape) != 3 or min(image_shape) < 1:
            raise ValueError(
                f"data.image_shape={list(image_shape)} must be channels, height and width: "
                "type data.image_shape=[3,32,32]"
            )
        counts = {
            "num_classes": num_classes,
            "length": length,
            "val_length": val_length,
            "test_length": test_length,
        }
        for name, value in counts.items():
            if value < 1:
                raise ValueError(f"data.{name}={value} must be at least 1: type data.{name}=1 or more")
        if delay_ms < 0:
            raise ValueError(f"data.delay_ms={delay_ms} must not be negative: type data.delay_ms=0")
        channels, height, width = image_shape
        self.image_shape = (channels, height, width)
        self.num_classes = num_classes
        self.lengths = (length, val_length, test_length)
        self.delay_ms = delay_ms

    def setup(self, stage: str | None = None) -> None:
        if self.train_set is not None:
            return
        train, val, test = self.lengths
        self.train_set = self._split(0, train)
        self.val_set = self._split(train, val)
        self.test_set = self._split(train + val, test)

    def _split(self, first_index: int, length: int) -> SyntheticImageDataset:
        return SyntheticImageDataset(length, self.image_shape, self.num_classes, self.seed, first_index, self.delay_ms)
