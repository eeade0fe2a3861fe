"""One job that starts no ranks for its function: it runs in this process, and may start others itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from project.config import preflight, unread_keys
from project.errors import UserError
from project.launch import devices, rank, run_folder
from project.launch.clock import process_started_at
from project.launch.run import Outcome, Run
from project.launch.summary import shorten


def run_local_job(
    function: str, composed: DictConfig, overrides: list[str], kind: str, sweep_folder: Path | None = None
) -> Outcome:
    """Check the config, claim the folder ``<outputs>/<kind>_<date>_<time>``, and run ``function`` (``module:name``).

    Raises:
        UserError: something in the config can't work; no folder was made.
    """
    launcher = devices.started_by()
    if launcher:
        raise UserError(f"{kind} starts its ranks itself: start it once, without {launcher}")
    unread_keys.check_added(composed, overrides, kind)
    config = _plain(composed)
    preflight.check(config)
    preflight.check_complete(config)
    chosen = sweep_folder or (Path(composed.paths.run_dir) if composed.paths.run_dir else None)
    folder = run_folder.take(chosen) if chosen else run_folder.claim(Path(composed.paths.outputs), f"{kind}_")
    composed.paths.run_dir = str(folder)
    config = _plain(composed)
    environment = run_folder.describe_environment()
    run_folder.record(folder, config, overrides, environment)
    print(f"{kind} in {shorten(folder)}", flush=True)
    return rank.load(function)(config, Run(folder, overrides, environment, process_started_at()))


def _plain(composed: DictConfig) -> dict[str, Any]:
    plain: dict[str, Any] = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)  # type: ignore[assignment]
    return plain
