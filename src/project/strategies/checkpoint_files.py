"""Checkpoint files: whole or absent, checked before they are trusted, the older ones kept behind the newest."""

from __future__ import annotations

import errno
import json
import shutil
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.distributed.tensor import DTensor

from project.errors import UserError
from project.notices import notice
from project.strategies.readable import ADVICE, described, unreadable

PART = ".part"  # what is still being written
DAMAGED = ".damaged"
CHECKSUMS = "checksums.json"  # of a folder of shards; a file carries its own


class CheckpointFiles(TorchCheckpointIO):
    """Writes beside, then renames; where that fails, warns, and lets the training go on to the next save.

    Attributes:
        failure: Why the last save failed; None where it did not.
    """

    def __init__(self) -> None:
        self.failure: str | None = None
        self._is_checked = False
        self._writer: ThreadPoolExecutor | None = None
        self._pending: dict[Path, Future[str | None]] = {}  # to why it failed
        self._failed: set[Path] = set()  # and nobody has asked for the path since

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        self.save(write_file, checkpoint, Path(path), storage_options)

    def save(
        self, write: Callable[..., None], checkpoint: Any, path: Path, storage_options: dict[str, Any] | None = None
    ) -> None:
        """Let ``write`` write a checkpoint; ``storage_options`` are those of ``put``, and ``in_background``.

        In the background a copy in the host's memory is written, one after another in the order in which they were
        asked for; ``wait`` says how it ended.

        Raises:
            UserError: the first holds what can't be read back.
        """
        rest = checkpoint[-1] if isinstance(checkpoint, tuple) else checkpoint  # beside the tensors of shards
        if not self._is_checked and (found := unreadable(rest)) is not None:
            keys, value = found
            place = "/".join(keys) or "it"
            raise UserError(
                f"the checkpoint {path.name} can't be read back, {place} in it is {described(value)}: {ADVICE} "
                "(on_save_checkpoint of the model, state_dict of callbacks and data)"
            )
        self._is_checked = True  # what is saved later is of the same kinds
        options = dict(storage_options or {})
        self.wait(path)  # no more than one copy of a name
        self.failure = None
        if not options.pop("in_background", False):
            self.wait()  # what was asked for before is there before
            self.failure = _written(write, checkpoint, path, options)
            return
        self._writer = self._writer or ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._pending[path] = self._writer.submit(_written, write, copy_to_host(checkpoint), path, options)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        from project.strategies.sharded_checkpoint import is_sharded, load_sharded

        self.wait()
        if is_sharded(Path(path)):  # of a run that was spread over ranks, and goes on under another strategy
            return load_sharded(Path(path), like={}, weights_only=kwargs.get("weights_only"))
        return super().load_checkpoint(path, *args, **kwargs)

    def wait(self, path: Path | None = None) -> bool:
        """Wait until what is written in the background, under a path or all of it, is there; whether it is.

        An error that is not of the disk is raised here.
        """
        paths = [path] if path is not None else list(self._pending)
        self._failed |= {one for one in paths if one in self._pending and self._pending.pop(one).result()}
        failed = self._failed.intersection(paths)
        if path is not None:
            self._failed.discard(path)
        return not failed

    def teardown(self) -> None:
        """The end of a training: all files are there, and no thread is left."""
        try:
            self.wait()
        finally:
            if self._writer is not None:
                self._writer.shutdown()
                self._writer = None
            self._pending.clear()


def write_file(checkpoint: dict[str, Any], path: Path, place: int = 0, keep: int = 1) -> None:
    """Write one plain file; ``place`` and ``keep`` are those of ``put``."""
    beside = path.with_name(path.name + PART)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with beside.open("wb") as file:
            torch.save(checkpoint, file)
        put(beside, path, place, keep)
    except (OSError, RuntimeError):
        remove(beside)
        raise


def _written(write: Callable[..., None], checkpoint: Any, path: Path, options: dict[str, Any]) -> str | None:
    """Why it failed, where it did for the disk."""
    try:
        write(checkpoint, path, **options)
    except (OSError, RuntimeError) as error:
        if not is_of_disk(error):
            raise
        why = reason(error, path)
        notice(
            f"{path} could not be written ({why}): training goes on, what was saved before is still there, and the "
            "next save is tried"
        )
        return why
    return None


def copy_to_host(checkpoint: Any) -> Any:
    """A checkpoint that the training can no longer change; what two of its tensors share, their copies share.

    Of a DTensor the own shard is copied; it says as before which part of the whole that is.
    """
    copies: dict[Any, Tensor] = {}

    def copied(tensor: Tensor) -> Tensor:
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        place = own.untyped_storage().data_ptr(), own.storage_offset(), own.shape, own.stride(), own.dtype
        key = *place, type(tensor), tensor.shape
        if not own.numel() or key not in copies:
            copies[key] = tensor.detach().to("cpu", copy=True)
        return copies[key]

    def copied_tree(node: Any) -> Any:
        # What a checkpoint consists of for the most part, without the general search: 0.5 ms instead of 1.2.
        if isinstance(node, dict) and type(node) in (dict, OrderedDict):
            return type(node)((key, copied_tree(value)) for key, value in node.items())
        if type(node) in (list, tuple):
            return type(node)(copied_tree(value) for value in node)
        if node is None or isinstance(node, str | int | float):
            return node
        return apply_to_collection(node, Tensor, copied)

    return copied_tree(checkpoint)


def is_of_disk(error: BaseException) -> bool:
    """Whether an error came from writing a file, also where torch's zip writer hides it."""
    return isinstance(error, OSError) or any(
        words in str(error) for words in ("PytorchStreamWriter", "file write failed", "unexpected pos")
    )


def reason(error: BaseException, path: Path) -> str:
    """What kept a file from being written: the system's words, or those of a full disk behind torch's."""
    of_system = error if isinstance(error, OSError) else error.__context__
    if isinstance(of_system, OSError) and of_system.strerror:
        full = of_system.errno in (errno.ENOSPC, errno.EDQUOT)
        free = f", {shutil.disk_usage(path.parent).free / 2**20:.0f} MiB are free" if full else ""
        return of_system.strerror + free
    return " ".join(str(error).split())[:200]


def put(written: Path, path: Path, place: int = 0, keep: int = 1) -> None:
    """Rename what was written beside to ``numbered(path, place)``, and let those from there on move down by one.

    ``keep`` is how many there are at most; what falls off the end is removed. Each may be a file or a folder.
    """
    remove(numbered(path, keep - 1) if keep > 1 else Path("/nonexistent"))
    for number in range(keep - 1, place, -1):
        if numbered(path, number - 1).exists():
            numbered(path, number - 1).rename(numbered(path, number))
    target = numbered(path, place)
    if target.is_dir() or (written.is_dir() and target.exists()):  # can't be replaced in one step
        old = target.with_name(target.name + ".old")
        remove(old)
        target.rename(old)
        written.rename(target)
        remove(old)
    else:
        written.replace(target)


def numbered(path: Path, number: int) -> Path:
    """``last.ckpt``, and behind it ``last-1.ckpt``, ``last-2.ckpt``, ..."""
    return path if number == 0 else path.with_name(f"{path.stem}-{number}{path.suffix}")


def all_numbered(path: Path) -> list[Path]:
    """What there is of ``numbered(path, ...)``, in that order."""
    beside = [one for one in path.parent.glob(f"{path.stem}-*{path.suffix}") if one == numbered(path, number_of(one))]
    return [one for one in (path, *sorted(beside, key=number_of)) if one.exists()]


def number_of(path: Path) -> int:
    """The number of ``numbered``."""
    last = path.stem.rpartition("-")[2]
    return int(last) if last.isdigit() else 0


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint; None where every byte is as it was written.

    A file is a zip archive, with a checksum (CRC-32) for each tensor. A folder of shards lists those of its files.
    """
    if path.is_dir():
        return _damage_of_folder(path)
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
    except (OSError, zipfile.BadZipFile, EOFError) as error:
        return "it is not whole" if isinstance(error, zipfile.BadZipFile | EOFError) else str(error.strerror)
    return None if bad is None else f"the checksum of {bad} is wrong"


def _damage_of_folder(path: Path) -> str | None:
    try:
        sums = json.loads((path / CHECKSUMS).read_text())
    except (OSError, ValueError):
        return "it is not whole"
    for name, expected in sums.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if checksum(file) != expected:
            return f"the checksum of {name} is wrong"
    return None


def checksum(path: Path) -> int:
    """CRC-32 of a file."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(2**22):
            value = zlib.crc32(block, value)
    return value


def newest(folder: Path, name: str = "last.ckpt") -> Path | None:
    """The newest whole checkpoint of a name; for one process. None where there is none.

    What a killed run left half-written is removed. A damaged checkpoint is told, and set aside as ``*.damaged``, so
    that it does not move down over the whole one before it.
    """
    first = folder / name
    for left in folder.glob(f"{first.stem}*{PART}"):
        remove(left)
    for path in sorted(folder.glob(f"{first.stem}*{first.suffix}.old")):  # a folder that was about to be replaced
        target = path.with_suffix("")
        if target.exists():
            remove(path)
        else:
            path.rename(target)
    for path in all_numbered(first):
        wrong = damage(path)
        if wrong is None:
            return path
        aside = path.with_name(path.name + DAMAGED)
        remove(aside)
        path.rename(aside)
        print(f"{path} is damaged ({wrong}): it is now {aside.name}, and the one before it is taken", flush=True)
    return None
