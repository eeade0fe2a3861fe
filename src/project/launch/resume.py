"""Going on with a run: its own config with what is typed on top, in its folder, from its last whole checkpoint."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from project.config.composition import config_folder
from project.config.from_checkpoint import is_group, quote_path, typed_overrides, untyped
from project.config.secrets import masked_arguments
from project.config.trust import check_targets, signature, trusted_packages
from project.errors import UserError, nearest
from project.launch.run_folder import RESUMED

if TYPE_CHECKING:
    from project.launch.run import Run

LOCK = ".lock"
LENGTHS = ("trainer.max_epochs", "trainer.max_steps", "trainer.max_time")


def compose_resumed(name: str, arguments: list[str]) -> str:
    """Register the config ``<name>_resumed`` for Hydra, where ``resume=<run folder>`` was typed, and say its name.

    It is the run's own, as it was written down, whatever has become of the config files since. A group that is typed
    (``optimizer=sgd``) takes the place of the run's.

    Raises:
        UserError: there is no run in the folder, or it is complete.
    """
    if not any(argument.startswith("resume=") for argument in arguments):
        return name
    quote_path(arguments, "resume")
    overrides = typed_overrides(arguments)
    if overrides["resume"][1].value() is None:
        return name
    value = overrides["resume"][1].value()
    if not isinstance(value, str) or any(argument in ("-m", "--multirun") for argument in arguments):
        raise UserError(f"resume={value} is no run folder: type resume=<run folder>, one at a time and without -m")
    folder = Path(value)
    node = stored_config(folder)
    if is_complete(folder) and not any(key in overrides for key in LENGTHS):
        raise UserError(
            f"the run in {folder} is complete: type trainer.max_epochs=N too, with more than its "
            f"{node['trainer'].get('max_epochs')}, to train longer"
        )
    for key, (typed, override) in overrides.items():
        if key.partition(".")[0] in ("optimizer", "scheduler") and (key, override.value()) != ("scheduler", "none"):
            raise UserError(
                f"{typed} can't be: a run that goes on keeps its optimizer and its schedule, whose states lie in the "
                "checkpoint: leave it out, type scheduler=none for the last learning rate, or start a new run"
            )
    signed = is_own(folder)
    node = linked(node, stored_overrides(folder), name)
    defaults: list[Any] = ["_self_", {"hydra": "default"}]
    for group in sorted(overrides, key=lambda group: group.count("/")):
        outer, _, inner = group.rpartition("/")
        if not is_group(group) or {outer: None} in defaults:
            continue
        parent = node
        for part in outer.split("/") if outer else []:
            parent = parent[part]
        if isinstance(parent, dict):
            parent.pop(inner, None)
        defaults.append({group: None})
    trusted = overrides.get("launch.trusted_targets")
    allowed = trusted_packages(trusted[1].value() if trusted else None)
    if not signed:
        check_targets(untyped(node, overrides), str(folder / "config.yaml"), allowed)
    ConfigStore.instance().store(name=f"{name}_resumed", node={"defaults": defaults, **node})
    return f"{name}_resumed"


def stored_config(folder: Path) -> dict[str, Any]:
    """The config of a run, from its folder, wherever that has been moved to.

    Raises:
        UserError: there is none.
    """
    try:
        config = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not folder.exists():
            raise UserError(f"resume={folder} does not exist{_nearest_folder(folder)}") from None
        raise UserError(
            f"resume={folder} holds no run, there is no config.yaml ({error.strerror}): type resume=<run folder>"
        ) from None
    if not isinstance(config, dict) or not isinstance(config.get("paths"), dict):
        raise UserError(f"resume={folder} holds no run, its config.yaml is another's: type resume=<run folder>")
    here, before = str(folder.resolve()), str(config["paths"].get("run_dir"))
    moved: dict[str, Any] = _replaced(config, before, here)
    return moved | {"paths": moved["paths"] | {"run_dir": here}, "resume": here}


def _nearest_folder(folder: Path) -> str:
    """What may have been meant by a path that does not exist, as the end of a sentence about it."""
    there = next(parent for parent in folder.parents if parent.exists())  # at the last "." or "/"
    begun, *rest = folder.relative_to(there).parts
    names = [path.name for path in there.iterdir() if path.is_dir()] if os.access(there, os.R_OK) else []
    match = nearest(begun, names) or next((name for name in sorted(names) if name.startswith(begun)), None)
    if match is None:
        return ": type resume=<run folder>"
    whole = there.joinpath(match, *rest)
    return f": did you mean {whole if whole.exists() else there / match}?"


def linked(config: dict[str, Any], overrides: list[str], name: str) -> dict[str, Any]:
    """A run's config, in which values that others follow are followed again: ``model.optimizer`` is ``${optimizer}``.

    As far as the config files still say so, and the values agree; a config that can't be composed anew stays as it is.
    """
    try:
        with initialize_config_dir(str(config_folder()), version_base="1.3"):
            files = OmegaConf.to_container(compose(name, overrides), resolve=False)
    except Exception:  # whatever Hydra finds wrong with files that have changed since
        return config

    def link(node: Any, of_files: Any) -> Any:
        if isinstance(of_files, str) and (followed := re.fullmatch(r"\$\{([\w.]+)\}", of_files)):
            value: Any = config
            for part in followed.group(1).split("."):
                value = value.get(part) if isinstance(value, dict) else None
            return of_files if value == node else node
        if isinstance(node, dict) and isinstance(of_files, dict):
            return {key: link(child, of_files.get(key)) for key, child in node.items()}
        return node

    followed: dict[str, Any] = link(config, files)
    return followed


def _replaced(node: Any, before: str, now: str) -> Any:
    if isinstance(node, dict):
        return {key: _replaced(child, before, now) for key, child in node.items()}
    if isinstance(node, list):
        return [_replaced(child, before, now) for child in node]
    inside = isinstance(node, str) and (node == before or node.startswith(before + os.sep))
    return now + node[len(before) :] if inside else node


def is_own(folder: Path) -> bool:
    """Whether this user ran the config here that lies in a run's folder."""
    try:
        signed = json.loads((folder / "environment.json").read_text()).get("signature")
    except (OSError, ValueError, AttributeError):
        return False
    return signed is not None and signed == signature(OmegaConf.to_container(OmegaConf.load(folder / "config.yaml")))


def is_complete(folder: Path) -> bool:
    """Whether the run in a folder came to its end."""
    return (folder / "metrics.json").is_file()


def stored_overrides(folder: Path) -> list[str]:
    """What was typed when a run began, and whenever it went on since."""
    path = folder / "overrides.yaml"
    return [str(text) for text in OmegaConf.load(path)] if path.is_file() else []


def take_up(folder: Path, overrides: list[str], command: list[str]) -> None:
    """Note in a run's folder that it goes on, and how."""
    (folder / "metrics.json").unlink(missing_ok=True)  # of a run that is to train longer
    line = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": socket.gethostname(),
        "overrides": masked_arguments([text for text in overrides if not text.startswith("resume=")]),
        "command": masked_arguments(command),
    }
    with (folder / RESUMED).open("a") as file:
        file.write(json.dumps(line) + "\n")


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep a run's folder for this process; the system lets it go when the process ends, however it does.

    Raises:
        UserError: another process is writing into it.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    with (folder / LOCK).open("a+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            raise UserError(
                f"{folder} is in use by {file.read().strip() or 'another process'}: wait for its end, or stop it"
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


@dataclass(frozen=True)
class Point:
    """Where a run goes on: its checkpoint, and the optimizer steps behind it."""

    path: str | None = None
    step: int = 0


def resume_point(run: Run, config: dict[str, Any]) -> Point:
    """The newest whole checkpoint of a run that goes on, the same on all ranks; no path where it starts anew."""
    if not run.resumes:
        return Point()
    import torch.distributed as dist

    told: list[Any] = [None]
    if run.rank == 0:
        told = [_newest(run.folder, config)]
    if run.world_size > 1:
        dist.broadcast_object_list(told, src=0)
    point: Point = told[0]
    return point


def _newest(folder: Path, config: dict[str, Any]) -> Point:
    from project.strategies.checkpoint_files import newest
    from project.strategies.checkpoint_order import stored_step

    kept = [node for node in (config.get("callbacks") or {}).values() if isinstance(node, dict)]
    dirpath = next((node["dirpath"] for node in kept if node.get("_target_", "").endswith(".LastCheckpoint")), None)
    path = newest(Path(dirpath) if dirpath else folder / "checkpoints")
    if path is None:
        print("There is no checkpoint to go on from: the run starts from its beginning", flush=True)
        return Point()
    step = stored_step(path)
    print(f"Going on after step {step} ({path.name})", flush=True)
    return Point(str(path), step)


def continue_curves(loggers: list[Any], point: Point, rank: int) -> None:
    """Let loggers add to the curves that are there, from a point's step on; what was written after it is dropped."""
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger._kwargs["purge_step"] = point.step  # TensorBoard then leaves out earlier points from there on
            if rank == 0:
                _drop_later_points(Path(logger.log_dir), point.step + 1)  # the tracker counts steps that are done
        elif isinstance(logger, CSVLogger) and rank == 0:
            _continue_csv(logger, point.step)


def _drop_later_points(folder: Path, step: int) -> None:
    """Write into each folder of the tracker's curves what makes TensorBoard leave out points that were there before."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    for run in {path.parent for path in folder.glob("*/events.out.tfevents.*")}:
        writer = EventFileWriter(str(run))
        writer.add_event(Event(wall_time=time.time(), step=step, session_log=SessionLog(status=SessionLog.START)))
        writer.close()


def _continue_csv(logger: Any, step: int) -> None:
    """Lightning's CSV logger begins with an empty file."""
    path = Path(logger.log_dir) / "metrics.csv"
    rows: list[dict[str, str]] = []
    if path.is_file():
        with path.open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if row.get("step", "").isdigit() and int(row["step"]) < step]
    logger.experiment.metrics.extend(rows)
