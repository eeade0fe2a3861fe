"""The digits' splits and their facts."""

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from project.data import DigitsDataModule, digits


def loaded(**arguments: Any) -> DigitsDataModule:
    datamodule = DigitsDataModule(**arguments)
    datamodule.setup()
    return datamodule


def images(datamodule: DigitsDataModule) -> dict[str, torch.Tensor]:
    splits = {"train": datamodule.train_set, "val": datamodule.val_set, "test": datamodule.test_set}
    return {name: split.tensors["image"] for name, split in splits.items()}  # type: ignore[union-attr]


def test_splits_hold_every_digit_once_and_are_standardized_by_the_training_images() -> None:
    splits = images(loaded(val_fraction=0.2, test_fraction=0.1))
    assert {name: len(image) for name, image in splits.items()} == {"train": 1258, "val": 359, "test": 180}
    assert len({tuple(image.flatten().tolist()) for split in splits.values() for image in split}) == 1797
    assert splits["train"].mean().item() == pytest.approx(0, abs=1e-5)
    assert splits["train"].std().item() == pytest.approx(1, abs=1e-5)
    assert abs(splits["test"].mean().item()) > 1e-4


def test_batch_is_what_the_nets_expect() -> None:
    batch = next(iter(loaded(batch_size=16).train_dataloader()))
    assert batch["image"].shape == (16, 1, 8, 8)
    assert batch["image"].dtype == torch.float32
    assert batch["label"].shape == (16,)
    assert batch["label"].dtype == torch.int64
    assert set(batch["label"].tolist()) <= set(range(10))


def test_zero_is_a_seed_and_setting_up_twice_changes_nothing() -> None:
    datamodule = loaded(seed=0)
    first = images(datamodule)["test"]
    datamodule.setup("test")
    assert torch.equal(first, images(datamodule)["test"])
    assert torch.equal(first, images(loaded(seed=0))["test"])
    assert not torch.equal(first, images(loaded(seed=1))["test"])


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        ({"image_shape": [3, 32, 32]}, r"type data.image_shape=\[1,8,8\]"),
        ({"num_classes": 9}, "type data.num_classes=10"),
        ({"val_fraction": 0.5, "test_fraction": 0.5}, "leave training samples"),
        ({"test_fraction": 0.0}, "must be above 0"),
    ],
)
def test_untrue_facts_and_empty_splits_are_refused(arguments: dict[str, Any], advice: str) -> None:
    with pytest.raises(ValueError, match=advice):
        DigitsDataModule(**arguments)


def test_the_file_is_read_as_scikit_learn_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = load_digits()
    expected = np.column_stack([theirs.data, theirs.target])
    assert np.array_equal(digits.read_digits(), expected)
    monkeypatch.setattr(digits, "find_spec", lambda name: None)  # as if the file were elsewhere
    assert np.array_equal(digits.read_digits(), expected)
