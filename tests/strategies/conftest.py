"""Whole runs through the launcher, for comparison."""

import json
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from comparison import Run
from project.launch.composition import config_folder, register_resolvers
from project.launch.job import run_job


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """``run("trainer/strategy=ddp", "trainer.devices=2")`` trains: the run folder and its metrics.

    ``command="evaluate"`` and ``config`` start from a checkpoint's config instead. Runs of equal arguments are
    shared by all tests of a session.
    """
    outputs = tmp_path_factory.mktemp("outputs")
    done: dict[Any, tuple[Path, dict[str, float]]] = {}
    register_resolvers()

    def train(*overrides: str, command: str = "train", name: str | None = None) -> tuple[Path, dict[str, float]]:
        key = (command, overrides)
        if key not in done:
            with initialize_config_dir(str(config_folder()), version_base="1.3"):
                composed = compose(name or command, [f"paths.outputs={outputs}", *overrides])
            before = set(outputs.rglob("config.yaml"))
            run_job(f"project.{command}:{command}", composed, list(overrides), command)
            (config,) = set(outputs.rglob("config.yaml")) - before
            done[key] = config.parent, json.loads((config.parent / "metrics.json").read_text())["metrics"]
        return done[key]

    return train
