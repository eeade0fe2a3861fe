"""Run one way to train in a fresh process, one at a time, and read how long it took."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from project.benchmarking.task import Task


class MeasurementError(Exception):
    """A measured process failed; the text is its own last line."""


@dataclass(frozen=True)
class Measured:
    """A finished process.

    Attributes:
        started_s: When it was started, on the monotonic clock.
        wall_s: From its start to its end.
        report: What ``StepClock`` wrote; empty where the process has no steps.
    """

    started_s: float
    wall_s: float
    report: dict[str, Any]


@dataclass(frozen=True)
class Contender:
    """One of the sides that are compared.

    Attributes:
        name: Tells it from all others.
        arguments: Of python; ``{report}`` and ``{folder}`` stand for a new file and a new folder. The path of the
            task, if there is one, comes last.
        seconds: What is compared, of a finished process; less is better.
        task: What it trains.
        threads: CPU threads of each of its ranks; None leaves them to it.
        process: The contender whose process does both, and reports on both; None for one of its own.
    """

    name: str
    arguments: list[str]
    seconds: Callable[[Measured], float]
    task: Task | None = None
    threads: int | None = 1
    process: str | None = None


def measure(contender: Contender, folder: Path, timeout_s: float) -> Measured:
    """Run a contender to its end, with its output in ``<folder>/output.log``.

    Raises:
        MeasurementError: it failed, or took longer than ``timeout_s``.
    """
    folder.mkdir(parents=True)
    report, run_dir, task_file = folder / "report.json", folder / "run", folder / "task.json"
    arguments = [text.format(report=report, folder=run_dir) for text in contender.arguments]
    if contender.task is not None:
        config = _moved(contender.task.config, contender.task.config["paths"]["run_dir"], str(run_dir))
        replace(contender.task, report=str(report), config=config).write(task_file)
        arguments.append(str(task_file))
    # Each rank has its share of the cores unless the user said otherwise. How idle threads wait is the same for all:
    # the command has decided it (project.cpu).
    threads = {} if contender.threads is None else {"OMP_NUM_THREADS": str(contender.threads)}
    environment = threads | dict(os.environ)
    output = folder / "output.log"
    started_s = time.monotonic()
    with output.open("wb") as log:
        process = psutil.Popen(
            [sys.executable, *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout_s)
        except psutil.TimeoutExpired:
            raise MeasurementError(f"no end after {timeout_s} s: see {output}") from None
        finally:
            _end(process)
    wall_s = time.monotonic() - started_s
    if code != 0:
        raise MeasurementError(_last_words(output) or f"ended with exit code {code}")
    return Measured(started_s, wall_s, json.loads(report.read_text()) if report.exists() else {})


def _moved(node: Any, old: str, new: str) -> Any:
    """A config with every path below one folder (checkpoints, event files) moved below another."""
    if isinstance(node, dict):
        return {key: _moved(child, old, new) for key, child in node.items()}
    if isinstance(node, list):
        return [_moved(child, old, new) for child in node]
    return new + node.removeprefix(old) if isinstance(node, str) and node.startswith(old) else node


def _end(process: psutil.Popen) -> None:
    """End all of a process that is still alive: what outlives it would disturb the next measurement."""
    family = set()
    with suppress(psutil.NoSuchProcess):
        family.update([process, *process.children(recursive=True)])
    for other in psutil.process_iter():
        with suppress(ProcessLookupError, PermissionError):
            if os.getsid(other.pid) == process.pid:
                family.add(other)
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(family, timeout=10)


def _last_words(output: Path) -> str:
    """The error in a log: the sentence of a user's error, or else the exception that a rank or the process raised."""
    lines = [line.strip() for line in output.read_text(errors="replace").splitlines() if line.strip()]
    told = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    of_ranks = [line.partition("]: ")[2] for line in lines if line.startswith("[rank")]  # as torch prefixes them
    raised, raised_by_ranks = (
        [line for line in some if line.partition(":")[0].endswith(("Error", "Exception"))] for some in (lines, of_ranks)
    )
    return (told or raised_by_ranks or raised or lines or [""])[-1][:300]


def seconds_per_step(warmup_steps: int, per_step: int = 1) -> Callable[[Measured], float]:
    """Mean time of a step after the first ones, divided by ``per_step`` (samples); changes of epoch are left out."""

    def seconds(measured: Measured) -> float:
        return statistics.fmean(step_times_s(measured.report, warmup_steps)) / per_step

    return seconds


def step_times_s(report: dict[str, Any], warmup_steps: int) -> list[float]:
    """Time of each step after the first ones, but for the first step of each epoch: it waits for validation."""
    ends_s, epochs = report["ends_s"], report["epochs"]
    same_epoch = [i for i in range(max(1, warmup_steps), len(ends_s)) if epochs[i] == epochs[i - 1]]
    return [ends_s[i] - ends_s[i - 1] for i in same_epoch]


def seconds_per_epoch(warmup_epochs: int) -> Callable[[Measured], float]:
    """Mean time from the end of an epoch's last step to that of the next: validation and checkpoints included."""

    def seconds(measured: Measured) -> float:
        last_s = dict(zip(measured.report["epochs"], measured.report["ends_s"], strict=True))
        ends_s = [last_s[epoch] for epoch in sorted(last_s)][warmup_epochs - 1 :]
        mean_s: float = (ends_s[-1] - ends_s[0]) / (len(ends_s) - 1)
        return mean_s

    return seconds


def seconds_to_first_step(measured: Measured) -> float:
    first_s: float = measured.report["ends_s"][0]
    return first_s - measured.started_s


def whole_seconds(measured: Measured) -> float:
    return measured.wall_s
