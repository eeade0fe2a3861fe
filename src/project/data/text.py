"""Text of any kind as bytes, cut into blocks; by default Python's own sources."""

import hashlib
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from project.data.datamodule import DataModule
from project.files import beside

# Folders in the standard library's that are not the library.
FOREIGN_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})


class ByteBlocks(Dataset[dict[str, Tensor]]):
    """Block i begins at byte `start + i * context` of a file and is `context + 1` bytes long.

    So each byte after the first is predicted once. The file is mapped for each batch, not kept: workers need not
    copy it, and the operating system shares it between the ranks of a host.

    Args:
        path: The file.
        context: Bytes that are read; the block's other byte is only predicted.
        start: First byte of the first block.
        length: Number of blocks.
    """

    def __init__(self, path: Path, context: int, start: int, length: int) -> None:
        self.path = path
        self.context = context
        self.start = start
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: tensor[0] for name, tensor in self.__getitems__(torch.tensor([index])).items()}

    def __getitems__(self, indices: Sequence[int] | Tensor) -> dict[str, Tensor]:
        """`{"tokens": (B, context + 1) int64}`."""
        content = np.memmap(self.path, dtype=np.uint8, mode="r")
        starts = self.start + np.asarray(indices) * self.context
        blocks = content[starts[:, None] + np.arange(self.context + 1)]
        return {"tokens": torch.from_numpy(blocks.astype(np.int64))}


class TextDataModule(DataModule):
    """A file, or all files in a folder, as blocks of bytes for a language model.

    Batch: `{"tokens": (B, context + 1) int64}`, values below 256.

    The text is split in order: training blocks, then `val_blocks`, then `test_blocks`; no byte is in two splits. A
    folder's files are put one after another, in an order drawn from their names so that the splits are alike,
    into one file in `cache_dir`. It is made anew when a file was added, removed or changed.

    Args:
        path: File or folder; None takes the sources of Python's standard library, without its tests.
        suffixes: Endings of the files to take from a folder, as in [".py", ".md"]; None takes all, or ".py" of
            the standard library. Hidden files and folders are left out.
        context: Tokens that the net reads at most. Configs hand it on to the net.
        vocab_size: Number of different tokens. Configs hand it on likewise; only 256 is true here.
        max_bytes: Read no more than this; None reads all.
        val_blocks: Blocks that are kept for validation.
        test_blocks: Blocks that are kept for the test.
        cache_dir: None takes `$XDG_CACHE_HOME/project`, or `~/.cache/project`.
        loading: Arguments of `DataModule`.

    Raises:
        ValueError: A number is out of range, there is nothing to read, or it is too little.
    """

    def __init__(
        self,
        path: str | None = None,
        suffixes: Sequence[str] | None = None,
        context: int = 256,
        vocab_size: int = 256,
        max_bytes: int | None = None,
        val_blocks: int = 256,
        test_blocks: int = 512,
        cache_dir: str | None = None,
        **loading: Any,
    ) -> None:
        super().__init__(**loading)
        if vocab_size != 256:
            raise ValueError(f"data.vocab_size={vocab_size} but there are 256 bytes: type data.vocab_size=256")
        counts = {"context": context, "val_blocks": val_blocks, "test_blocks": test_blocks}
        for name, value in (counts | ({} if max_bytes is None else {"max_bytes": max_bytes})).items():
            if value < 1:
                raise ValueError(f"data.{name}={value} must be at least 1: type data.{name}=1 or more")
        self.path = None if path is None else Path(path).expanduser()
        self.suffixes = tuple(suffixes or ([".py"] if path is None else []))  # none: all files
        self.context = context
        self.vocab_size = vocab_size
        self.max_bytes = max_bytes
        self.val_blocks = val_blocks
        self.test_blocks = test_blocks
        self.cache_dir = None if cache_dir is None else Path(cache_dir).expanduser()

    def prepare_data(self) -> None:
        """Called by one rank of each host; where hosts share a disk, they may write the same file at once."""
        self._one_file()

    def setup(self, stage: str | None = None) -> None:
        if self.train_set is not None:
            return
        file = self._one_file()
        size = min(file.stat().st_size, self.max_bytes or file.stat().st_size)
        counts = {"val": self.val_blocks, "test": self.test_blocks}
        # A split of n blocks takes n * context + 1 bytes.
        kept = sum(blocks * self.context + 1 for blocks in counts.values())
        train_blocks = (size - kept - 1) // self.context
        if train_blocks < self.batch_size:
            needed = kept + self.batch_size * self.context + 1
            raise ValueError(
                f"{self.path or 'the standard library'} gives {size:,} bytes, but one training batch "
                f"(data.batch_size={self.batch_size}), data.val_blocks={self.val_blocks} and "
                f"data.test_blocks={self.test_blocks} of data.context={self.context} bytes need {needed:,}: "
                "type smaller values, or data.path= with more text"
            )
        start = 0
        for split, blocks in {"train": train_blocks, **counts}.items():
            setattr(self, f"{split}_set", ByteBlocks(file, self.context, start, blocks))
            start += blocks * self.context + 1

    def _one_file(self) -> Path:
        """The file to read: `path` itself, or the folder's files in one."""
        root = self.path or Path(sysconfig.get_path("stdlib"))
        if root.is_file():
            return root
        if not root.is_dir():
            raise ValueError(f"data.path={root} is neither a file nor a folder: type data.path= with one that is")
        sizes = self._listing(root)
        if not sizes:
            kind = f"no file that ends in {' or '.join(self.suffixes)}" if self.suffixes else "no file"
            raise ValueError(f"data.path={root} holds {kind}: type another data.path= or data.suffixes=")
        listing = hashlib.sha256(repr((str(root.resolve()), self.max_bytes)).encode())
        for path in sizes:
            status = path.stat()
            listing.update(repr((str(path), status.st_size, status.st_mtime_ns)).encode())
        target = self._cache_folder() / f"text_{listing.hexdigest()[:24]}.bin"
        if not target.exists():
            _concatenate(sizes, target, self.max_bytes)
        return target

    def _listing(self, root: Path) -> list[Path]:
        """The files to take, in an order that mixes folders and is the same everywhere."""
        found: list[Path] = []
        for folder, subfolders, names in os.walk(root):
            foreign = FOREIGN_FOLDERS if self.path is None else frozenset()
            subfolders[:] = [name for name in subfolders if name not in foreign and not name.startswith(".")]
            found += [
                Path(folder, name)
                for name in names
                if not name.startswith(".") and (not self.suffixes or name.endswith(self.suffixes))
            ]
        return sorted(
            filter(Path.is_file, found),
            key=lambda path: hashlib.sha256(path.relative_to(root).as_posix().encode()).digest(),
        )

    def _cache_folder(self) -> Path:
        folder = self.cache_dir or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "project"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"data.cache_dir={folder} can't be made ({error.strerror}): type data.cache_dir= with a folder of yours"
            ) from error
        return folder


def _concatenate(paths: Sequence[Path], target: Path, max_bytes: int | None) -> None:
    """Write the files' first `max_bytes`: whoever else does so writes the same."""
    left = max_bytes
    with beside(target) as written, written.open("wb") as file:
        for path in paths:
            content = path.read_bytes()[:left]
            file.write(content)
            if left is not None:
                left -= len(content)
                if left <= 0:
                    break
