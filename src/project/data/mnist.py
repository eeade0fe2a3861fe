"""MNIST and its drop-in replacements, out of the IDX files that they are published in."""

import gzip
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from project.data.published import Arrays, PublishedImages
from project.downloads import RemoteFile

FASHION = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion"


class MNIST(PublishedImages):
    """70,000 hand-written digits, grey, 28x28, of LeCun, Cortes and Burges; 10,000 of them are the test.

    Files and arguments are those of `PublishedImages`.
    """

    title = "mnist"
    shape = (1, 28, 28)
    classes = 10
    files = tuple(
        RemoteFile(f"https://ossci-datasets.s3.amazonaws.com/mnist/{name}", digest)
        for name, digest in {
            "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        }.items()
    )

    def read(self, paths: Sequence[Path], split: str) -> Arrays:
        images, labels = (read_idx(path) for path in (paths[:2] if split == "train" else paths[2:]))
        return images[:, None], labels.astype(np.int64)


class FashionMNIST(MNIST):
    """70,000 articles of clothing in the format of MNIST, after Xiao et al. 2017, https://arxiv.org/abs/1708.07747."""

    title = "fashion_mnist"
    files = tuple(
        RemoteFile(f"{FASHION}/{name}", digest)
        for name, digest in {
            "train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            "train-labels-idx1-ubyte.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            "t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            "t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        }.items()
    )


def read_idx(path: Path) -> NDArray[np.uint8]:
    """The array of bytes in a gzipped IDX file.

    It begins with two zeros, the type (8: bytes) and the number of dimensions; each dimension follows in four bytes,
    the highest first, then the values.

    Raises:
        ValueError: It is no such file, or its length is another than it says.
    """
    try:
        content = gzip.decompress(path.read_bytes())
    except (OSError, EOFError) as error:
        raise ValueError(f"{path} is no whole gzip file ({error}): delete it, or put the right one there") from error
    head = 4 + 4 * content[3] if content[:3] == b"\0\0\x08" and len(content) > 3 else 0
    shape = np.frombuffer(content[4:head], ">i4").tolist()
    if not shape or len(content) != head + math.prod(shape):
        raise ValueError(f"{path} is no IDX file of bytes: delete it, or put the right one there")
    return np.frombuffer(content, np.uint8, offset=head).reshape(shape)
