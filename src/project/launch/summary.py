"""What the user sees of a run at its start and at its end."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from project.config.composition import config_folder
from project.launch.run import Outcome, Run


def announce(kind: str, config: dict[str, Any], run: Run, world_size: int, num_devices: int) -> None:
    """One line at the start: what runs, on which data, on how many ranks, and where its folder is."""
    ranks = _ranks(world_size, num_devices if world_size == 1 else 1)
    name, data, seed = config.get("name", "unnamed"), _data_of(config), config.get("seed")
    print(f"{kind} {name} on {data}, {ranks}, seed {seed}, in {shorten(run.folder)}", flush=True)


def _data_of(config: dict[str, Any]) -> str:
    """The choice of ``data`` whose class it is, as ``digits``; the class itself where it is of no one choice.

    By the class and not by what was typed, since a checkpoint's config, or an experiment's, may say it too.
    """
    target = str(config["data"]["_target_"])
    files = (config_folder() / "data").glob("*.yaml")
    choices = [path.stem for path in files if f"\n_target_: {target}\n" in f"\n{path.read_text()}\n"]
    return choices[0] if len(choices) == 1 else target


def summarize(kind: str, config: dict[str, Any], run: Run, outcome: Outcome) -> None:
    """The table at the end: metrics, time, throughput, and where the results are."""
    table = Table(title=f"{kind} {config.get('name', 'unnamed')}", show_header=False, title_justify="left")
    for name, value in outcome.metrics.items():
        table.add_row(name, readable(value), *(_of_what(name, outcome) if kind == "train" else []))
    if kind == "train" and config.get("monitor") and outcome.checkpoint and outcome.objective is not None:
        table.add_row(f"best {config['monitor']}", readable(outcome.objective))
    table.add_section()
    if outcome.steps is not None:
        why = [f"ended early: {outcome.ended_early}"] if outcome.ended_early else []
        table.add_row("epochs, steps", f"{outcome.epochs}, {outcome.steps}", *why)
    if outcome.first_step_s is not None:
        table.add_row("first step after", f"{outcome.first_step_s:.1f} s")
    if outcome.train_s is not None:
        ranks = _ranks(outcome.world_size, outcome.num_devices)
        since = ["since it went on"] if run.resumes else []
        table.add_row("training time", f"{outcome.train_s:.1f} s on {ranks}", *since)
    if outcome.samples_per_s is not None:
        table.add_row("samples per second", f"{outcome.samples_per_s:,.0f}")
    if outcome.checkpoint:
        which = "last " if Path(outcome.checkpoint).stem == "last" else "best "  # where nothing was monitored
        table.add_row(f"{which if kind == 'train' else ''}checkpoint", shorten(Path(outcome.checkpoint)))
    for what, path in outcome.files.items():
        table.add_row(what, shorten(Path(path)))
    # A path must come through whole: it is there to be copied.
    widest = sum(max(len(str(cell)) for cell in column.cells) + 3 for column in table.columns)
    console = Console()
    console.width = max(console.width, widest + 1)
    console.print(table)
    for line in outcome.diagnosis:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if (run.folder / "tensorboard").is_dir():
        from project.tracking.charts import page_url

        # Without the option TensorBoard shows 1,000 points of a curve, and a spike may be none of them.
        options = "--samples_per_plugin scalars=100000"
        command = f"tensorboard --logdir {shlex.quote(shorten(run.folder))} {options}"
        console.print(command, highlight=False, soft_wrap=True)
        if console.is_terminal:  # where it can be clicked; to be read it is too long
            link = f"[link={page_url()}]http://localhost:6006[/link], with the curves that matter pinned"
            console.print(f"then open {link}", highlight=False, soft_wrap=True)


def _ranks(world_size: int, devices_of_each: int) -> str:
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    return ranks if devices_of_each == 1 else f"{ranks} with {devices_of_each} devices"


def _of_what(metric: str, outcome: Outcome) -> list[str]:
    """Of which steps, weights and ranks a training's metric tells: it is tested with others than it ends with."""
    what = []
    if metric in outcome.spans:
        what.append(f"of {outcome.spans[metric]}")
    elif outcome.checkpoint:
        what.append(f"of {Path(outcome.checkpoint).name}" if metric.startswith("test") else "of the last epoch")
    if metric in outcome.of_rank_0:
        what.append("rank 0's part")
    return [", ".join(what)] if what else []


def readable(value: float) -> str:
    """A metric to four digits; whole numbers whole."""
    if value.is_integer() and abs(value) > 1:
        return f"{value:,.0f}"
    return f"{value:.4f}" if abs(value) >= 1e-3 or value == 0 else f"{value:.2e}"


def shorten(path: Path) -> str:
    """The path as one would type it here: relative where it lies below this folder."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
