"""The folder of one run: claimed by exactly one run, and what is recorded in it."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import importlib.metadata
import json
import math
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from project.config.secrets import masked, masked_arguments
from project.cpu import usable_cores
from project.errors import UserError, full_tracebacks, sentence
from project.files import write_whole
from project.launch import run_state
from project.launch.run import Outcome

CLAIMED: list[Path] = []  # by this process, also what is no more

# Of a run that has no state of its own any more to tell by; a pattern each.
RESULTS = ("metrics.json", "predictions*", "checkpoints/*")

RESUMED = "resumed.jsonl"  # a line for each time that a run went on
RECORDS = ("config.yaml", "overrides.yaml", "environment.json", "metrics.json", RESUMED, run_state.FILE)


def claim(parent: Path, prefix: str = "") -> Path:
    """Create ``<parent>/<prefix><date>_<time>``; a second run of the same second gets ``..._2``.

    ``mkdir`` fails where the folder is there, so two runs can't both have it, on any file system.
    """
    stamp = prefix + datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    number = 1
    while True:
        folder = parent / (stamp if number == 1 else f"{stamp}_{number}")
        try:
            folder.mkdir(parents=True)
            CLAIMED.append(folder.resolve())
            return CLAIMED[-1]
        except FileExistsError:
            if not parent.is_dir():
                raise UserError(f"paths.outputs: {parent} is a file: type paths.outputs=FOLDER") from None
            number += 1
        except OSError as error:
            raise UserError(
                f"the run folder {folder} can't be created ({error.strerror}): type paths.outputs=FOLDER with a "
                "folder that you may write to"
            ) from error


@functools.cache
def new_folder(parent: str, prefix: str) -> str:
    """A claimed folder, the same one however often this process asks (Hydra asks several times for a sweep's)."""
    return str(claim(Path(parent), prefix))


def take(folder: Path) -> Path:
    """Create and claim the folder that the user or the sweep chose: one run creates its ``config.yaml``.

    Raises:
        UserError: it holds a run already, or can't be created.
    """
    config = folder / "config.yaml"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        config.touch(exist_ok=False)
    except OSError as error:
        if isinstance(error, FileExistsError) and config.exists():
            raise UserError(
                f"{folder} holds a run already: type another paths.run_dir, or leave it out for a new folder"
            ) from None
        raise UserError(
            f"the run folder {folder} can't be created ({error.strerror}): type paths.run_dir=FOLDER with a folder "
            "that you may write to"
        ) from error
    CLAIMED.append(folder.resolve())
    return CLAIMED[-1]


def missing(folder: Path) -> list[Path]:
    """The folder and those that it lies in, as far as they are not there yet; the innermost first.

    The first two also where other runs are in them: of runs that are refused together, the last is to take them away.
    """
    folder = folder.absolute()
    with_others = [path for path in (folder, folder.parent) if path.is_dir() and any(path.iterdir())]
    return [
        path
        for path in (folder, *folder.parents)
        if not path.exists() or (path in with_others and not Path.cwd().is_relative_to(path))
    ]


@contextmanager
def removed_if_refused(folder: Path, made: Sequence[Path]) -> Iterator[None]:
    """Let a run that its user's mistake ends before its first step leave nothing behind, as one that can't begin.

    With HYDRA_FULL_ERROR=1 its folder, with the ranks' logs, stays.

    Args:
        folder: Of the run.
        made: Folders that were made for it, the innermost first.
    """
    try:
        yield
    except BaseException as error:
        has_results = any(path.stat().st_size for name in RESULTS for path in folder.glob(name))
        if not has_results and is_refused(folder, error):
            _remove(folder, made)
        raise


@contextmanager
def restored_if_refused(folder: Path) -> Iterator[None]:
    """Let a run that is so ended leave its records as they were, in a folder that it took up or that was chosen.

    What was typed in vain must not stand in the way of what is typed next.
    """
    found = {name: folder / name for name in RECORDS if (folder / name).is_file()}
    before = {name: path.read_bytes() for name, path in found.items() if path.stat().st_size}  # a claim is empty
    try:
        yield
    except BaseException as error:
        state = folder / run_state.FILE  # untouched: this time it has not come so far as to note that it begins
        has_begun = state.is_file() and state.read_bytes() != before.get(run_state.FILE)
        refused = is_refused(folder, error) if has_begun else sentence(error) is not None
        if refused:
            for name in RECORDS:
                if name in before:
                    write_whole(folder / name, before[name].decode())
                else:
                    (folder / name).unlink(missing_ok=True)
        raise


def is_refused(folder: Path, error: BaseException) -> bool:
    """Whether the error that ends the run in this folder is its user's mistake, told before the first step."""
    known = run_state.read(folder)
    has_begun = known is not None or (folder / "ranks").exists()
    return not (known and known.trained) and (not has_begun or (sentence(error) is not None and not full_tracebacks()))


def _remove(folder: Path, made: Sequence[Path]) -> None:
    beside = folder.with_name(f".{folder.name}.refused")
    with suppress(OSError):  # at once, for ranks may still write; not where a file is open and the system minds
        folder.rename(beside)
        shutil.rmtree(beside, ignore_errors=True)
        for path in made:
            path.rmdir()


def record(folder: Path, config: dict[str, Any], overrides: list[str], environment: dict[str, Any]) -> None:
    """Write what is needed to know, and to repeat, the run; without secrets."""
    try:
        write_whole(folder / "config.yaml", OmegaConf.to_yaml(masked(config)))
        write_whole(folder / "overrides.yaml", OmegaConf.to_yaml(masked_arguments(overrides)))
        write_whole(folder / "environment.json", json.dumps(environment, indent=2) + "\n")
    except OSError as error:
        raise UserError(
            f"the run folder {folder} can't be written to ({error.strerror}): type paths.outputs=FOLDER with another"
        ) from error


def write_metrics(folder: Path, outcome: Outcome) -> None:
    """Write ``metrics.json``.

    Raises:
        UserError: the disk is full.
    """
    try:
        write_whole(folder / "metrics.json", json.dumps(_finite(dataclasses.asdict(outcome)), indent=2) + "\n")
    except OSError as error:
        raise UserError(
            f"the metrics can't be written to {folder} ({error.strerror}): make room, and type resume={folder}"
        ) from error


def read_metrics(folder: Path) -> Outcome:
    """The outcome of a run that is complete."""
    return Outcome(**json.loads((folder / "metrics.json").read_text()))


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, dict):
        return {key: _finite(child) for key, child in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def describe_environment() -> dict[str, Any]:
    """Versions, machine, git state and command line, as plain data."""
    packages = ["torch", "lightning", "torchmetrics", "hydra-core", "tensorboard", "numpy"]
    return {
        "time": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": masked_arguments([Path(sys.executable).name, *sys.orig_argv[1:]]),
        "folder": str(Path.cwd()),
        "host": socket.gethostname(),
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),  # as a launcher has assigned them
        "platform": platform.platform(),
        "cores": usable_cores(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in packages},
        "git": _git_state(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_state() -> dict[str, Any] | None:
    """Commit and dirtiness of the tree that this package lies in; None where it lies in none."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        ).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None
