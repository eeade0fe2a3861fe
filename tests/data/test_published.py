"""MNIST and CIFAR out of small files in their true formats."""

import gzip
import hashlib
import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir

from project.config.build import build
from project.config.composition import config_folder, register_resolvers
from project.data import CIFAR10, CIFAR100, MNIST, FashionMNIST
from project.data.mnist import read_idx
from project.data.published import PublishedImages
from project.downloads import RemoteFile

GENERATOR = np.random.default_rng(0)
TRAIN, TEST = 40, 12
KINDS: list[type[PublishedImages]] = [MNIST, FashionMNIST, CIFAR10, CIFAR100]


def idx(array: np.ndarray[Any, Any]) -> bytes:
    head = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    return gzip.compress(head + array.tobytes())


def archive(members: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as packed:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            packed.addfile(entry, io.BytesIO(content))
    return file.getvalue()


def images_and_labels(kind: type[PublishedImages], count: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    images = GENERATOR.integers(0, 256, (count, *kind.shape), dtype=np.uint8)
    return images, np.arange(count, dtype=np.uint8) % kind.classes


def records(kind: type[CIFAR10], images: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> bytes:
    superclass = np.full((len(labels), kind.label_bytes - 1), 99, dtype=np.uint8)
    return np.concatenate([superclass, labels[:, None], images.reshape(len(images), -1)], axis=1).tobytes()


def publish(kind: type[PublishedImages], folder: Path, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Write the files of a small data set, make their digests those that are expected, and return what is in them."""
    splits = {"train": images_and_labels(kind, TRAIN), "test": images_and_labels(kind, TEST)}
    if issubclass(kind, CIFAR10):
        members = {}
        for split, (images, labels) in splits.items():
            parts = zip(*(np.array_split(array, len(kind.members[split])) for array in (images, labels)), strict=True)
            members |= dict(zip(kind.members[split], (records(kind, *part) for part in parts), strict=True))
        contents = [archive(members)]
    else:
        contents = [idx(array) for images, labels in splits.values() for array in (images[:, 0], labels)]
    folder.mkdir(exist_ok=True)
    files = []
    for file, content in zip(kind.files, contents, strict=True):
        (folder / file.name).write_bytes(content)
        # Nothing listens there: what is at hand must do.
        files.append(RemoteFile(f"http://127.0.0.1:9/{file.name}", hashlib.sha256(content).hexdigest()))
    patch.setattr(kind, "files", files)
    return splits


def module(kind: type[PublishedImages], folder: Path, **arguments: Any) -> PublishedImages:
    channels = kind.shape[0]
    defaults: dict[str, Any] = {"batch_size": 8, "mean": [0.5] * channels, "std": [0.25] * channels}
    return kind(kind.shape, kind.classes, folder=str(folder), **defaults | arguments)


def loaded(kind: type[PublishedImages], folder: Path, **arguments: Any) -> PublishedImages:
    datamodule = module(kind, folder, **arguments)
    datamodule.prepare_data()
    datamodule.setup()
    return datamodule


def everything(datamodule: PublishedImages, split: str) -> dict[str, torch.Tensor]:
    dataset = getattr(datamodule, f"{split}_set")
    batch: dict[str, torch.Tensor] = dataset.__getitems__(torch.arange(len(dataset)))
    return batch


@pytest.mark.parametrize("kind", KINDS)
def test_all_images_come_with_their_labels_in_one_split(
    kind: type[PublishedImages], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = publish(kind, tmp_path, monkeypatch)
    datamodule = loaded(kind, tmp_path, val_fraction=0.25)
    train, val, test = (everything(datamodule, split) for split in ("train", "val", "test"))
    assert [len(split["label"]) for split in (train, val, test)] == [30, 10, TEST]

    images, labels = written["test"]
    assert torch.allclose(test["image"], (torch.from_numpy(images) / 255 - 0.5) / 0.25, atol=1e-6)
    assert test["label"].tolist() == labels.tolist()
    found = torch.cat([train["image"], val["image"]]).mul(0.25).add(0.5).mul(255).round().to(torch.uint8)
    kept = {
        image.numpy().tobytes(): label for image, label in zip(found, [*train["label"], *val["label"]], strict=True)
    }
    images, labels = written["train"]
    assert kept == {image.tobytes(): label for image, label in zip(images, labels.tolist(), strict=True)}


@pytest.mark.parametrize("kind", [MNIST, CIFAR10])
def test_files_are_unpacked_once_and_validation_is_drawn_by_the_seed(
    kind: type[PublishedImages], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(kind, tmp_path, monkeypatch)
    first = everything(loaded(kind, tmp_path), "val")
    for file in kind.files:
        (tmp_path / file.name).unlink()  # the arrays beside them have all that is needed
    assert torch.equal(everything(loaded(kind, tmp_path), "val")["image"], first["image"])
    assert not torch.equal(everything(loaded(kind, tmp_path, seed=1), "val")["image"], first["image"])


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_network_the_sentence_names_every_file_and_the_folder(
    kind: type[PublishedImages], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [file.name for file in kind.files]
    monkeypatch.setattr(kind, "files", [RemoteFile(f"http://127.0.0.1:9/{name}", "0") for name in names])
    with pytest.raises(ValueError, match=f"{names[0]} is not in {tmp_path} and can't be downloaded") as caught:
        module(kind, tmp_path).prepare_data()
    assert all(f"/{name}" in str(caught.value) for name in names)


def test_digests_of_the_true_files_are_whole_and_their_addresses_lead_over_tls() -> None:
    files = [file for kind in KINDS for file in kind.files]
    assert len({file.sha256 for file in files}) == len(files) == 10
    assert all(len(bytes.fromhex(file.sha256)) == 32 and file.url.startswith("https://") for file in files)


@pytest.mark.parametrize(
    "content",
    [
        b"no gzip",
        gzip.compress(b"\0\0\x08\x01\0\0\0\x05abcd"),
        gzip.compress(b"\0\0\x0d\x01\0\0\0\x01abcd"),
        gzip.compress(b"\0\0\x08"),
        gzip.compress(b"\0\0\x08\x01\0\0\0\x04abcd")[:-9],
    ],
    ids=["no gzip", "too few values", "floats", "half a header", "cut off"],
)
def test_what_is_no_whole_idx_file_is_told(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.gz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{path} is no (whole gzip|IDX) file"):
        read_idx(path)


@pytest.mark.parametrize("members", [{}, {"cifar-10-batches-bin/test_batch.bin": b"123"}])
def test_an_archive_without_whole_records_is_told(tmp_path: Path, members: dict[str, bytes]) -> None:
    path = tmp_path / "cifar.tar.gz"
    path.write_bytes(archive(members))
    with pytest.raises(ValueError, match=f"{path} (can't be read|holds no whole records)"):
        module(CIFAR10, tmp_path).read([path], "test")


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        ({"image_shape": (3, 28, 28)}, r"type data.image_shape=\[1,28,28\]"),
        ({"num_classes": 9}, "type data.num_classes=10"),
        ({"val_fraction": 0.0}, "type data.val_fraction=0.1"),
        ({"mean": [0.1, 0.2]}, r"type data.mean=\[0.5\] data.std=\[0.25\]"),
        ({"std": [0.0]}, "above 0"),
    ],
)
def test_untrue_facts_are_refused(arguments: dict[str, Any], advice: str) -> None:
    defaults: dict[str, Any] = {"image_shape": (1, 28, 28), "num_classes": 10, "mean": [0.1], "std": [0.2]}
    with pytest.raises(ValueError, match=advice):
        MNIST(**defaults | arguments)


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "cifar10", "cifar100"])
def test_configs_fit_their_data_modules(name: str) -> None:
    register_resolvers()
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        config = compose("train", [f"data={name}"])
    assert isinstance(build({"data": config.data}, "data"), PublishedImages)
