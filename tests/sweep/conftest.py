"""Sweeps whose jobs only pretend to train: all but the launcher is real."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra import version
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from project.config.composition import config_folder, register_resolvers
from project.launch.run import Outcome
from project.launch.run_folder import new_folder, write_metrics
from project.launch.run_state import recorded
from project.sweep import record
from project.sweep.plugins import register_plugins
from project.sweep.record import Sweep

Objective = Callable[[DictConfig], "float | Outcome"]
RunSweep = Callable[..., Sweep]


@pytest.fixture
def run_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunSweep:
    """``run_sweep(objective, "sweep=optuna", ...)``: a sweep in this process; its folder's record.

    ``objective(config)`` is what a job comes to: the value of ``val/accuracy``, or a whole outcome.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setattr("project.launch.agent.warm_up", lambda: None)  # no ranks will be started
    monkeypatch.setattr("project.sweep.figures.draw_all", lambda sweep, rows: None)  # has a test of its own

    def run(objective: Objective, *overrides: str) -> Sweep:
        new_folder.cache_clear()  # one sweep for each process, elsewhere
        register_resolvers()
        register_plugins()
        version.setbase("1.3")
        GlobalHydra.instance().clear()

        def task(config: DictConfig) -> float | None:
            folder = Path(HydraConfig.get().runtime.output_dir)
            with recorded(folder):
                result = objective(config)
                if not isinstance(result, Outcome):
                    result = Outcome({"val/accuracy": result}, objective=result)
                write_metrics(folder, dataclasses.replace(result, folder=str(folder)))
            return result.objective

        hydra = Hydra.create_main_hydra2("train", create_config_search_path(str(config_folder())))
        try:
            hydra.multirun("train", task, [f"paths.outputs={tmp_path}", "hydra.mode=MULTIRUN", *overrides])
        finally:
            GlobalHydra.instance().clear()
        newest = max(tmp_path.glob("*/*/sweep.json"), key=os.path.getmtime)
        return record.read(newest.parent)

    return run
