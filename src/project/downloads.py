"""Files from elsewhere: fetched once, checked, never half there."""

import contextlib
import hashlib
import os
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from project.files import beside

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

TIMEOUT_S = 20  # without a byte
CHUNK_BYTES = 2**20


@dataclass(frozen=True)
class RemoteFile:
    """A file that is known before it is fetched.

    Attributes:
        url: Where it is; its last part is the file's name here too.
        sha256: Its digest, or how that begins.
    """

    url: str
    sha256: str

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


def cache_folder(name: str) -> Path:
    """Where this user's files of that name are kept: `$XDG_CACHE_HOME/project/<name>`, or `~/.cache/project/<name>`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "project" / name


def fetch(files: Sequence[RemoteFile], folder: Path) -> list[Path]:
    """The files in `folder`; what is missing is downloaded, by one process of a host while others wait for it.

    Raises:
        ValueError: A file can't be downloaded, or is not the one that it should be.
    """
    with one_at_a_time(folder):
        missing = [file for file in files if not (folder / file.name).is_file()]
        for file in missing:
            try:
                download(file, folder)
            except OSError as error:
                left = [other for other in files if not (folder / other.name).is_file()]
                reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
                raise ValueError(
                    f"{file.name} is not in {folder} and can't be downloaded ({reason}): "
                    f"put {' and '.join(other.url for other in left)} there"
                ) from error
        for file in files:
            if not _digest(folder / file.name).startswith(file.sha256):
                raise ValueError(
                    f"{folder / file.name} is damaged, or another file than {file.url}: delete it, or put the right "
                    "one there"
                )
    return [folder / file.name for file in files]


def download(file: RemoteFile, folder: Path) -> None:
    """Fetch a file into a folder, where it appears whole or not at all.

    Raises:
        OSError: It can't be reached, comes to a standstill or ends early.
    """
    with urllib.request.urlopen(file.url, timeout=TIMEOUT_S) as answer:
        expected = answer.headers.get("Content-Length")
        print(f"Downloading {file.url} to {folder}", flush=True)
        size = 0
        with beside(folder / file.name) as written, written.open("wb") as target:
            while chunk := answer.read(CHUNK_BYTES):
                size += target.write(chunk)
            if expected is not None and size != int(expected):
                raise OSError(f"it ended after {size:,} of {int(expected):,} bytes")


@contextlib.contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Make a folder, and keep the other processes of this host out that ask for it in the same way.

    Raises:
        ValueError: The folder can't be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("a")
    except OSError as error:
        raise ValueError(
            f"nothing can be written into the folder {folder} ({error.strerror}): name one of your own"
        ) from error
    with lock:
        if fcntl is not None:
            with contextlib.suppress(OSError):  # a file system without locks: then several write the same file
                fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed, or its process ends
        yield


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
