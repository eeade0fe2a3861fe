"""The template itself, as ``python -m project.train`` runs it, with a config that is composed already.

python -m project.benchmarking.template TASK.json
"""

from __future__ import annotations

import sys
import traceback
from typing import Any

from omegaconf import OmegaConf

from project.benchmarking.task import Task
from project.errors import sentence
from project.launch.job import run_job


def run_template(function: str, config: dict[str, Any]) -> None:
    """Run ``function`` (``module:name``) on every rank, as the command does; an error ends the process in a line."""
    try:
        run_job(function, OmegaConf.create(config), overrides=[])
    except Exception as error:
        text = sentence(error)
        if text is None:
            traceback.print_exc()
        sys.exit(f"error: {text or error}")


def with_step_times(task: Task) -> dict[str, Any]:
    """The task's config with the callback that writes its report."""
    step_times = {
        "_target_": "project.benchmarking.step_times.StepTimes",
        "report": task.report,
        "steps": task.steps,
        "measure": task.measure,
    }
    return task.config | {"callbacks": {**(task.config.get("callbacks") or {}), "step_times": step_times}}


if __name__ == "__main__":
    run_template("project.train:train", with_step_times(Task.from_command_line()))
