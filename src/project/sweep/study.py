"""The Optuna study of a search: where it is stored, its sampler, its trials. The ranks of a trial open it too."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from project.errors import UserError

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler
    from optuna.storages import BaseStorage

    from project.sweep.space import Space


def check_storage(storage: str) -> None:
    """Check that it names what ``open_storage`` opens.

    Raises:
        UserError: it does not.
    """
    if storage not in ("journal", "sqlite") and "://" not in storage:
        raise UserError(f"sweep.storage={storage} can't be: type journal, sqlite, or the URL of a database")


def open_storage(storage: str, folder: Path) -> BaseStorage:
    """Where a study's trials are kept: ``journal`` or ``sqlite``, a file in ``folder``, or the URL of a database.

    The journal works on any file system, and without SQLAlchemy, whose import takes rank 0 of every trial 0.8 s.

    Raises:
        UserError: it can't be opened.
    """
    import optuna
    from optuna.storages import JournalStorage, RDBStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if storage == "journal":
        return JournalStorage(JournalFileBackend(str(folder / "study.journal")))
    check_storage(storage)
    try:
        if storage == "sqlite":
            # Sweeper and ranks write to it: each waits for the other that long.
            return RDBStorage(f"sqlite:///{folder}/study.db", engine_kwargs={"connect_args": {"timeout": 60}})
        return RDBStorage(storage)
    except Exception as error:
        text = " ".join(str(error).split())
        raise UserError(f"sweep.storage={storage} can't be opened ({text}): type journal, sqlite, or a URL") from error


def source_digests(config: DictConfig) -> dict[str, str]:
    """Of each class that trials train, net and data included: the digest of the file in which it is written."""
    digests: dict[str, str] = {}
    for key in ("data", "model", "model.net"):
        target = OmegaConf.select(config, f"{key}._target_")
        file = _source_file(str(target)) if target else None
        if file is not None:
            digests[str(target)] = hashlib.sha256(file.read_bytes()).hexdigest()
    return digests


def _source_file(target: str) -> Path | None:
    """Of the module in ``module.Class`` or ``module.Class.method``; None where there is none, as of compiled code.

    Nothing is imported: packages may import torch, which the process that searches does without.
    """
    first, *parts = target.split(".")[:-1] or [""]
    spec = None
    with suppress(ValueError):  # of no name, or of a module that came from no file
        spec = importlib.util.find_spec(first)
    for number in range(len(parts)):
        if spec is None or spec.submodule_search_locations is None:
            break
        name = ".".join([first, *parts[: number + 1]])
        inner = PathFinder.find_spec(name, spec.submodule_search_locations)
        if inner is None:  # a class of the package
            break
        spec = inner
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin else None


def build_sampler(node: dict[str, Any], space: Space, trials_before: int) -> BaseSampler:
    """The sampler of a config.

    A sampler begins its random numbers anew when a study goes on: it would propose the same trials again. Its seed is
    therefore moved on by the trials that there are.

    Raises:
        UserError: it needs a package that is not installed, or refuses its arguments.
    """
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    from project.sweep.space import grid_of

    node = dict(node)
    if node["_target_"] == "optuna.samplers.GridSampler":
        node |= {"_target_": "project.sweep.grid_sampler.GridSampler", "search_space": grid_of(space)}
    elif node.get("seed") is not None:
        node["seed"] += trials_before
    try:
        sampler: BaseSampler = instantiate(node, _convert_="all")
    except InstantiationException as error:
        text = " ".join(str(error.__cause__ or error).split())
        raise UserError(f"sweep.sampler: {node['_target_']} can't be built: {text}") from error
    if type(sampler).__name__ == "CmaEsSampler":
        try:
            import cmaes  # noqa: F401
        except ImportError as error:
            raise UserError(
                "sweep/sampler=cma_es needs the package cmaes, which is not installed: type "
                'pip install "project[sweep]"'
            ) from error
    return sampler


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the study of ``folder``: a second search would take this one's running trials for dead.

    The lock goes with the process, however that ends.

    Raises:
        UserError: another search holds it.
    """
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(
                f"{folder} is being searched by another process: wait for it, or type sweep.study=NAME for a study of "
                "its own (more trials at once: sweep.n_jobs)"
            ) from error
        yield
