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


def train(task: Task) -> None:
    callbacks = task.config.get("callbacks") or {}
    step_times: dict[str, Any] = {"report": task.report, "steps": task.steps}
    if task.measure == "tracking":
        step_times |= {"_target_": "project.benchmarking.tracking_turns.TrackingTurns"}
    else:
        step_times |= {
            "_target_": "project.benchmarking.step_times.StepTimes",
            "measure": task.measure,
            "warmup_steps": task.warmup_steps,
        }
    config = task.config | {"callbacks": {**callbacks, "step_times": step_times}}
    run_job("project.train:train", OmegaConf.create(config), overrides=[])


if __name__ == "__main__":
    try:
        train(Task.from_command_line())
    except Exception as error:
        text = sentence(error)
        if text is None:
            traceback.print_exc()
        sys.exit(f"error: {text or error}")
