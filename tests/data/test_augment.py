"""What augmentation may change, and on what it depends."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from project.data import DataModule, ImageDataset
from project.data.augment import Augmentation, RandomCrop, RandomFlip, RandomShift, augmented
from project.data.draws import sample_seeds

SEEDS = sample_seeds(0, torch.arange(64))


def pictures(count: int = 64, channels: int = 3, height: int = 6, width: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (count, channels, height, width), generator=generator, dtype=torch.uint8)


def brighter(image: Tensor) -> Tensor:
    """As torchvision's v2 transforms: one image, and torch's random numbers."""
    return (image + torch.randint(1, 200, ())).clamp(max=255).to(torch.uint8)


KINDS: list[Augmentation] = [RandomFlip(), RandomShift(2), RandomCrop((0.3, 0.6)), brighter]


class Pictures(DataModule):
    """Each with its own number as its label."""

    augmentations: tuple[Augmentation, ...] = tuple(KINDS)

    def setup(self, stage: str | None = None) -> None:
        images = pictures()
        label = torch.arange(len(images))
        self.train_set = ImageDataset(images.__getitem__, label, [0.5] * 3, [0.25] * 3, self.augmentations)
        self.val_set = self.train_set


def epoch_images(
    ranks: int, epoch: int, num_workers: int = 0, seed: int = 0, first_batch: int = 0
) -> dict[int, Tensor]:
    """What each image is in an epoch, of all ranks."""
    found = {}
    for rank in range(ranks):
        datamodule = Pictures(batch_size=16, seed=seed, num_workers=num_workers)
        datamodule.setup()
        strategy = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": ranks, "rank": rank})
        trainer = SimpleNamespace(strategy=strategy, training=False, accumulate_grad_batches=1)
        datamodule.trainer = trainer  # type: ignore[assignment]
        loader: Any = datamodule.train_dataloader()
        loader.batches_done = lambda: first_batch
        loader.sampler.set_epoch(epoch)
        for batch in loader:
            found |= dict(zip(batch["label"].tolist(), batch["image"], strict=True))
    return found


def same(left: dict[int, Tensor], right: dict[int, Tensor]) -> list[bool]:
    return [torch.equal(image, right[label]) for label, image in left.items()]


@pytest.mark.parametrize(("ranks", "num_workers"), [(2, 0), (4, 0), (2, 2)])
def test_an_image_becomes_the_same_whatever_the_ranks_and_workers(ranks: int, num_workers: int) -> None:
    one = epoch_images(1, epoch=3)
    assert len(one) == 64
    assert all(same(one, epoch_images(ranks, epoch=3, num_workers=num_workers)))


def test_another_epoch_and_another_seed_change_it() -> None:
    one = epoch_images(1, epoch=0)
    assert not any(same(one, epoch_images(1, epoch=1)))
    assert not any(same(one, epoch_images(1, epoch=0, seed=1)))


def test_an_epoch_that_goes_on_after_an_interruption_has_the_same_images() -> None:
    rest = epoch_images(1, epoch=2, first_batch=2)
    assert len(rest) == 32
    assert all(same(rest, epoch_images(1, epoch=2)))


def test_evaluation_sees_images_as_they_are_and_the_models_random_numbers_stay() -> None:
    datamodule = Pictures(batch_size=64)
    datamodule.setup()
    (batch,) = datamodule.val_dataloader()
    assert torch.allclose(batch["image"], (pictures() / 255 - 0.5) / 0.25, atol=1e-6)
    before = torch.get_rng_state()
    datamodule.train_set.getitems_in_training(torch.arange(64), SEEDS)  # type: ignore[union-attr]
    assert torch.equal(torch.get_rng_state(), before)


def test_flip_mirrors_its_share_of_the_images() -> None:
    images = pictures()
    changed = RandomFlip(0.5)(images, SEEDS)
    is_mirrored = [torch.equal(new, old.flip(-1)) for new, old in zip(changed, images, strict=True)]
    is_same = [torch.equal(new, old) for new, old in zip(changed, images, strict=True)]
    assert all(m != s for m, s in zip(is_mirrored, is_same, strict=True))
    assert 16 < sum(is_mirrored) < 48
    assert torch.equal(RandomFlip(0.0)(images, SEEDS), images)
    assert torch.equal(RandomFlip(1.0)(images, SEEDS), images.flip(-1))


def test_shift_moves_each_image_by_its_own_distance_and_fills_with_black() -> None:
    images = pictures()
    moved = RandomShift(2)(images, SEEDS)
    seen = set()
    for new, old in zip(moved, images, strict=True):
        padded = torch.nn.functional.pad(old, (2, 2, 2, 2))
        places = [(y, x) for y in range(5) for x in range(5) if torch.equal(padded[:, y : y + 6, x : x + 8], new)]
        assert len(places) == 1
        seen.update(places)
    assert len(seen) > 15  # of 25


def test_crop_takes_parts_of_the_image_of_the_areas_it_was_told() -> None:
    # Pixels tell their place: columns in the first channel, rows in the second.
    H, W = 32, 48
    rows, columns = torch.meshgrid(torch.arange(H), torch.arange(W), indexing="ij")
    image = torch.stack([columns * 5, rows * 7]).to(torch.uint8)
    cropped = RandomCrop((0.3, 0.5), ratio=1.2)(image.expand(64, -1, -1, -1), SEEDS).float()
    width = (cropped[:, 0, 0, -1] - cropped[:, 0, 0, 0]) / 5 / W  # shares of the image's sides
    height = (cropped[:, 1, -1, 0] - cropped[:, 1, 0, 0]) / 7 / H
    area = width * height
    assert 0.22 < area.min() < 0.32  # less than 0.3 by the outer half pixels
    assert 0.42 < area.max() < 0.52
    assert (width / height).min() > 1 / 1.3
    assert (width / height).max() < 1.3
    assert cropped[:, 0, 0, 0].unique().numel() > 15  # in many places
    whole = RandomCrop((1.0, 1.0), ratio=1.0)(image[None], SEEDS[:1])
    assert torch.equal(whole[0], image)


@pytest.mark.parametrize(
    "transform",
    [lambda image: image[:, 1:], lambda image: image.float(), lambda image: image[:, torch.randint(5, ()) :]],
)
def test_an_augmentation_that_changes_shape_or_type_is_told(transform: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(ValueError, match=r"they must stay \(3, 6, 8\) of torch.uint8"):
        augmented(pictures(), SEEDS, [transform])


@pytest.mark.parametrize(
    ("make", "advice"),
    [
        (lambda: RandomFlip(1.5), "type data.augment.flip.share=0.5"),
        (lambda: RandomShift(0), "type data.augment.shift.pixels=4"),
        (lambda: RandomCrop((0.0, 1.0)), r"type data.augment.crop.area=\[0.35,1.0\]"),
        (lambda: RandomCrop(ratio=0.5), "type data.augment.crop.ratio=1.33"),
    ],
)
def test_numbers_out_of_range_are_refused(make: Callable[[], Augmentation], advice: str) -> None:
    with pytest.raises(ValueError, match=advice):
        make()


def test_torchvisions_v2_transforms_run_image_by_image() -> None:
    v2 = pytest.importorskip("torchvision.transforms.v2")
    images = pictures()
    changed = augmented(images, SEEDS, [v2.RandomHorizontalFlip()])
    mirrored = [torch.equal(new, old.flip(-1)) for new, old in zip(changed, images, strict=True)]
    assert 16 < sum(mirrored) < 48  # on the batch it would be all or none
    wild = [v2.TrivialAugmentWide(), v2.ColorJitter(0.4, 0.4), v2.RandomErasing(1.0)]
    assert torch.equal(augmented(images, SEEDS, wild)[:7], augmented(images[:7], SEEDS[:7], wild))
