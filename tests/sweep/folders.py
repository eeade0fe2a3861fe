"""Sweep folders as jobs leave them, without running any."""

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import yaml

from project.sweep.jobs import Job
from project.sweep.record import Sweep


def write_run(
    folder: Path,
    state: str | None = "finished",
    metrics: dict[str, float | None] | None = None,
    objective: float | None = None,
    error: str | None = None,
    pid: int | None = None,
    overrides: list[str] | None = None,
    config: dict[str, Any] | None = None,
    times: tuple[float, float] | None = None,
    **outcome: Any,
) -> Path:
    """A run folder; with ``state=None`` and no metrics that of a job which has not begun.

    ``times``: when it began and ended, in seconds before now.
    """
    folder.mkdir(parents=True)
    if state is not None:
        now = time.time()
        began_s, ended_s = times or (10, 0)
        said = {"state": state, "started_at": now - began_s, "ended_at": now - ended_s, "error": error}
        said["host"] = socket.gethostname()
        (folder / "state.json").write_text(json.dumps(said | {"pid": os.getpid() if pid is None else pid}))
    if metrics is not None or objective is not None:
        written = {"metrics": metrics or {}, "objective": objective, "world_size": 2, **outcome}
        (folder / "metrics.json").write_text(json.dumps(written))
    (folder / "overrides.yaml").write_text(yaml.safe_dump(overrides or []))
    (folder / "config.yaml").write_text(yaml.safe_dump({"monitor": "val/loss", "mode": "min"} | (config or {})))
    return folder


def make_sweep(folder: Path, *parameters: dict[str, str], **more: Any) -> Sweep:
    """A sweep with a job of each of the parameters; their folders are not there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [Job.of(number, chosen, folder) for number, chosen in enumerate(parameters)]
    settings: dict[str, Any] = {"objectives": {"val/loss": "min"}, "fixed": [], "total": len(jobs)} | more
    sweep = Sweep(folder, "grid", jobs=jobs, **settings)
    sweep.write()
    return sweep


def trials_of(sweep: Sweep, storage: str = "journal") -> list[Any]:
    """The trials of a search's study."""
    import optuna

    from project.sweep.study import open_storage

    study = optuna.load_study(study_name=sweep.folder.name, storage=open_storage(storage, sweep.folder))
    return study.get_trials(deepcopy=False)
