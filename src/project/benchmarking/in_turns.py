"""The template's training with one of its callbacks and without it, in turns, in the same processes.

Two processes that do the same differ by some percent, by where their memory lies and what else runs; turns of seconds
within one of them show a difference of less than one.

python -m project.benchmarking.in_turns CALLBACK PAIRS TASK.json
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from project.benchmarking.measure import Measured, moved, step_times_s
from project.benchmarking.task import Task
from project.benchmarking.template import run_template, with_step_times
from project.launch.run import Outcome, Run


def train(config: dict[str, Any], run: Run) -> Outcome:
    """What each rank does: trainings, of which every second one, first or second of its pair, lacks the callback."""
    from project.train import train

    turns = config.pop("turns")
    task = Task(config, turns["steps"], "", measure="train")
    done: dict[str, list[dict[str, Any]]] = {"with": [], "without": []}
    for pair in range(turns["pairs"]):
        for side in ("with", "without") if pair % 2 else ("without", "with"):
            folder = run.folder / f"{pair}_{side}"
            report = folder / "report.json"
            folder.mkdir(exist_ok=True)  # of several ranks
            moved_config = moved(config, str(run.folder), str(folder))
            own = with_step_times(replace(task, config=moved_config, report=str(report)))
            if side == "without":
                own["callbacks"].pop(turns["callback"])
            outcome = train(own, replace(run, folder=folder))
            if run.rank == 0:
                done[side].append(json.loads(report.read_text()))
    if run.rank == 0:
        Path(turns["report"]).write_text(json.dumps(done))
    return outcome


def seconds_per_step(side: str, warmup_steps: int) -> Callable[[Measured], float]:
    """Mean time of a step after the first ones, in the median turn ``with`` the callback or ``without`` it."""

    def seconds(measured: Measured) -> float:
        return statistics.median(statistics.fmean(step_times_s(turn, warmup_steps)) for turn in measured.report[side])

    return seconds


def main() -> None:
    callback, pairs = sys.argv[1:3]
    del sys.argv[1:3]
    task = Task.from_command_line()
    turns = {"callback": callback, "pairs": int(pairs), "steps": task.steps, "report": task.report}
    run_template("project.benchmarking.in_turns:train", task.config | {"turns": turns})


if __name__ == "__main__":
    main()
