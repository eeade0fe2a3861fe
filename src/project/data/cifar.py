"""CIFAR-10 and CIFAR-100, out of the binary archives: the others are pickles, which may run whatever they hold."""

import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from project.data.published import Arrays, PublishedImages
from project.downloads import RemoteFile

PIXELS = 3 * 32 * 32


class CIFAR10(PublishedImages):
    """60,000 colour photos of 32x32 pixels in 10 classes, of Krizhevsky 2009; 10,000 of them are the test.

    https://www.cs.toronto.edu/~kriz/cifar.html describes the records: the label in a byte (CIFAR-100 has the
    superclass before it), then the red, green and blue pixels. Arguments are those of `PublishedImages`.
    """

    title = "cifar10"
    shape = (3, 32, 32)
    classes = 10
    files = (
        RemoteFile(
            "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        ),
    )
    members: ClassVar[dict[str, list[str]]] = {
        "train": [f"cifar-10-batches-bin/data_batch_{number}.bin" for number in range(1, 6)],
        "test": ["cifar-10-batches-bin/test_batch.bin"],
    }
    label_bytes: ClassVar[int] = 1  # of a record; the last is the class

    def read(self, paths: Sequence[Path], split: str) -> Arrays:
        content = _members(paths[0], self.members[split])
        record = self.label_bytes + PIXELS
        if not content or len(content) % record:
            raise ValueError(f"{paths[0]} holds no whole records of {record} bytes: put the binary version there")
        records = np.frombuffer(content, np.uint8).reshape(-1, record)
        images = records[:, self.label_bytes :].reshape(-1, *self.shape)
        return images, records[:, self.label_bytes - 1].astype(np.int64)


class CIFAR100(CIFAR10):
    """The same in 100 classes, with 600 photos each."""

    title = "cifar100"
    classes = 100
    files = (
        RemoteFile(
            "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
            "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
        ),
    )
    members: ClassVar[dict[str, list[str]]] = {
        "train": ["cifar-100-binary/train.bin"],
        "test": ["cifar-100-binary/test.bin"],
    }
    label_bytes = 2


def _members(path: Path, names: Sequence[str]) -> bytes:
    """Files of an archive, one after another; nothing is unpacked to disk."""
    parts = []
    try:
        with tarfile.open(path, "r:gz") as archive:
            for name in names:
                member = archive.extractfile(name)
                assert member is not None  # None is a folder
                parts.append(member.read())
    except (tarfile.TarError, OSError, EOFError, KeyError) as error:
        raise ValueError(f"{path} can't be read ({error}): delete it, or put the binary version there") from error
    return b"".join(parts)
