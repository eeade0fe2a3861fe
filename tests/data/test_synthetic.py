"""Made-up images: reproducible, bounded, learnable, slow on demand."""

import time
from typing import Any

import pytest
import torch

from project.data import SyntheticImages
from project.data.synthetic import SyntheticImageDataset


def dataset(**arguments: Any) -> SyntheticImageDataset:
    defaults: dict[str, Any] = {"length": 4096, "image_shape": (3, 8, 8), "num_classes": 10, "seed": 0}
    return SyntheticImageDataset(**defaults | arguments)


def test_sample_depends_on_seed_and_index_alone() -> None:
    batch = dataset().__getitems__(torch.tensor([5, 4000]))
    alone = dataset(length=10**9)[4000]
    assert torch.equal(batch["image"][1], alone["image"])
    assert torch.equal(batch["label"][1], alone["label"])
    assert not torch.equal(dataset(seed=1)[4000]["image"], alone["image"])


@pytest.mark.parametrize("image_shape", [(1, 1, 1), (3, 32, 32), (3, 224, 224)])
def test_memory_is_bounded_for_any_shape_and_length(image_shape: tuple[int, int, int]) -> None:
    noise = dataset(length=10**9, image_shape=image_shape).noise
    assert noise.nbytes <= 64 * 2**20
    assert len(noise) <= 1024


def test_images_are_standardized_and_distinct() -> None:
    batch = dataset(image_shape=(3, 32, 32)).__getitems__(torch.arange(3000))
    assert batch["image"].mean().item() == pytest.approx(0, abs=0.05)
    assert batch["image"].std().item() == pytest.approx(1, abs=0.05)
    assert len(set(map(tuple, batch["image"][:, :, :2, :2].flatten(1).tolist()))) == 3000
    assert torch.equal(batch["label"].bincount(), torch.full((10,), 300))


def test_labels_of_test_images_can_be_learned_from_training_images() -> None:
    datamodule = SyntheticImages(image_shape=(1, 8, 8), length=1000, test_length=200)
    datamodule.setup()
    train = datamodule.train_set.__getitems__(torch.arange(1000))  # type: ignore[union-attr]
    test = datamodule.test_set.__getitems__(torch.arange(200))  # type: ignore[union-attr]
    means = torch.stack([train["image"][train["label"] == label].mean(0) for label in range(10)])
    nearest = torch.cdist(test["image"].flatten(1), means.flatten(1)).argmin(1)
    assert (nearest == test["label"]).float().mean() > 0.95


def test_loader_has_the_asked_lengths_and_shapes() -> None:
    datamodule = SyntheticImages(image_shape=[2, 6, 5], length=64, val_length=7, test_length=9, batch_size=32)
    datamodule.setup()
    batch = next(iter(datamodule.train_dataloader()))
    assert batch["image"].shape == (32, 2, 6, 5)
    assert batch["image"].dtype == torch.float32
    assert batch["label"].dtype == torch.int64
    loaders = [datamodule.train_dataloader(), datamodule.val_dataloader(), datamodule.test_dataloader()]
    assert [sum(len(batch["label"]) for batch in loader) for loader in loaders] == [64, 7, 9]


def test_fetching_takes_the_delay_of_each_sample() -> None:
    slow = dataset(delay_ms=5)
    start = time.perf_counter()
    slow.__getitems__(torch.arange(10))
    assert time.perf_counter() - start >= 0.05


@pytest.mark.parametrize(
    "arguments", [{"image_shape": [8, 8]}, {"num_classes": 0}, {"test_length": 0}, {"delay_ms": -1}]
)
def test_impossible_numbers_are_refused_by_name(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"data.{next(iter(arguments))}="):
        SyntheticImages(**arguments)
