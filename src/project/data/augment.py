"""Augmentation of whole batches, each image by random numbers of its own.

What an image becomes depends on the run's seed, the epoch and the image's place in the dataset alone: not on the ranks,
the workers, or the batch that it is in.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import interpolate, pad

from project.data.draws import sample_seeds, uniforms


class BatchAugmentation(ABC):
    """One that changes all images of a batch at once, each in its own way."""

    @abstractmethod
    def __call__(self, images: Tensor, seeds: Tensor) -> Tensor:
        """Images (B, C, H, W) uint8 to others of the same shape; `seeds` (B,) int64, one for each image."""


Augmentation = BatchAugmentation | Callable[[Tensor], Tensor]


def augmented(images: Tensor, seeds: Tensor, augmentations: Sequence[Augmentation]) -> Tensor:
    """Images (B, C, H, W) uint8 after all augmentations, in their order.

    Any that is no `BatchAugmentation` is called with one image (C, H, W) at a time, as torchvision's v2 transforms
    must be: given a batch, they draw once and change all its images alike. What it draws from torch's random numbers
    is drawn from the image's seed.

    Raises:
        ValueError: One returns another shape or type.
    """
    for number, augmentation in enumerate(augmentations):
        own = sample_seeds(number, seeds)  # or all of them would draw the same
        if isinstance(augmentation, BatchAugmentation):
            changed = augmentation(images, own)
        else:
            changed = _one_by_one(augmentation, images, own)
        if changed.shape != images.shape or changed.dtype != torch.uint8:
            raise ValueError(
                f"the augmentation {type(augmentation).__name__} made images {tuple(changed.shape[1:])} of "
                f"{changed.dtype}, but they must stay {tuple(images.shape[1:])} of torch.uint8: leave sizes to "
                "data.image_shape, and numbers to data.mean and data.std"
            )
        images = changed
    return images


def _one_by_one(transform: Callable[[Tensor], Tensor], images: Tensor, seeds: Tensor) -> Tensor:
    generator = torch.default_generator
    state = generator.get_state()
    changed = []
    try:
        for image, seed in zip(images, seeds.tolist(), strict=True):
            generator.manual_seed(seed)
            changed.append(transform(image))
    finally:
        generator.set_state(state)  # the model's own numbers must not depend on what the data drew
    shapes = {image.shape for image in changed}
    return torch.stack(changed) if len(shapes) == 1 else changed[0].new_empty(len(changed), 0)


class RandomFlip(BatchAugmentation):
    """Left and right exchanged.

    Args:
        share: Of the images that are flipped.

    Raises:
        ValueError: `share` is not in [0, 1].
    """

    def __init__(self, share: float = 0.5) -> None:
        if not 0 <= share <= 1:
            raise ValueError(f"data.augment.flip.share={share} must be from 0 to 1: type data.augment.flip.share=0.5")
        self.share = share

    def __call__(self, images: Tensor, seeds: Tensor) -> Tensor:
        flipped = uniforms(seeds, 1)[:, 0] < self.share
        return torch.where(flipped[:, None, None, None], images.flip(-1), images)


class RandomShift(BatchAugmentation):
    """Moved by up to `pixels` up or down and left or right; black comes in from the side.

    It is the crop out of a padded image of He et al. 2016, https://arxiv.org/abs/1512.03385.

    Raises:
        ValueError: `pixels` is below 1.
    """

    def __init__(self, pixels: int = 4) -> None:
        if pixels < 1:
            raise ValueError(f"data.augment.shift.pixels={pixels} must be at least 1: type data.augment.shift.pixels=4")
        self.pixels = pixels

    def __call__(self, images: Tensor, seeds: Tensor) -> Tensor:
        B, C, H, W = images.shape
        offsets = (uniforms(seeds, 2) * (2 * self.pixels + 1)).long()
        rows = offsets[:, :1] + torch.arange(H)  # (B, H)
        columns = offsets[:, 1:] + torch.arange(W)  # (B, W)
        padded = pad(images, (self.pixels,) * 4)
        batch, channels = torch.arange(B)[:, None, None, None], torch.arange(C)[:, None, None]
        return padded[batch, channels, rows[:, None, :, None], columns[:, None, None, :]]


class RandomCrop(BatchAugmentation):
    """A part of the image, enlarged to its size, after Szegedy et al. 2014, https://arxiv.org/abs/1409.4842.

    Args:
        area: Least and greatest share of the image's area.
        ratio: The part is at most this many times as wide as high, in relation to the image, and as high as wide.

    Raises:
        ValueError: A number is out of range.
    """

    def __init__(self, area: Sequence[float] = (0.35, 1.0), ratio: float = 4 / 3) -> None:
        if len(area) != 2 or not 0 < area[0] <= area[1] <= 1:
            raise ValueError(
                f"data.augment.crop.area={list(area)} must be two shares above 0 and at most 1: "
                "type data.augment.crop.area=[0.35,1.0]"
            )
        if ratio < 1:
            raise ValueError(f"data.augment.crop.ratio={ratio} must be at least 1: type data.augment.crop.ratio=1.33")
        self.area = (area[0], area[1])
        self.ratio = ratio

    def __call__(self, images: Tensor, seeds: Tensor) -> Tensor:
        numbers = uniforms(seeds, 4)
        area = self.area[0] + (self.area[1] - self.area[0]) * numbers[:, 0]
        ratio = torch.exp((2 * numbers[:, 1] - 1) * math.log(self.ratio))
        whole = torch.tensor(images.shape[2:])
        shares = torch.stack([(area / ratio).sqrt(), (area * ratio).sqrt()], dim=1).clamp(max=1)
        sizes = (shares * whole).round().long().clamp(min=1)  # (B, 2): height and width
        corners = ((whole - sizes + 1) * numbers[:, 2:]).long()
        cropped = torch.empty_like(images)
        # One by one, since each has another size: on bytes, that takes less time than to sample the whole batch.
        for place, ((top, left), (height, width)) in enumerate(zip(corners.tolist(), sizes.tolist(), strict=True)):
            part = images[place : place + 1, :, top : top + height, left : left + width]
            cropped[place] = interpolate(part, images.shape[2:], mode="bilinear", align_corners=False)[0]
        return cropped
