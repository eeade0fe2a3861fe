"""The best run of a sweep as an experiment file: ``python -m project.train experiment=<sweep>/best.yaml``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

from project.config.composition import config_folder
from project.files import write_whole
from project.sweep.record import Sweep
from project.sweep.results import Row

# What belongs to the sweep or the machine and not to the experiment.
LEFT_OUT = ("sweep", "paths", "debug", "launch")


def write_experiment(sweep: Sweep, best: Row) -> Path:
    """Write ``best.yaml``: all that was typed for the sweep, and the parameters of its best run."""
    # sweep.experiment says where the typed experiment is.
    typed = [text for text in sweep.fixed if not text.startswith("experiment=")]
    job = next(job for job in sweep.jobs if job.number == best.number)
    typed += [f"{key}={value}" for key, value in job.parameters.items()]
    values = ", ".join(
        f"{name} {value:.6g}"
        for name, value in zip(sweep.objectives, best.objectives, strict=True)
        if value is not None
    )
    path = sweep.folder / "best.yaml"
    write_whole(path, experiment(typed, sweep.experiment, f"Run {best.number} of {sweep.folder.name}: {values}"))
    return path


def experiment(typed: list[str], base: str | None, comment: str) -> str:
    """The text of an experiment file that says what the overrides ``typed`` say on top of the experiment ``base``.

    ``base`` is a name from ``conf/experiment``, or the path of such a file elsewhere, which is taken up.
    """
    defaults: list[Any] = []
    values: dict[str, Any] = {}
    if base is not None and Path(base).suffix:
        values = yaml.safe_load(Path(base).read_text()) or {}
        defaults = values.pop("defaults", [])
    elif base is not None:
        defaults = [base]
    removed: list[str] = []
    for override in OverridesParser.create().parse_overrides(typed):
        key = override.key_or_group
        if key.replace("/", ".").split(".")[0] in LEFT_OUT:
            continue
        if override.is_delete() or override.package:
            removed.append(str(override.input_line))
        elif not (config_folder() / key).is_dir():
            _put(values, key.split("."), override)
        elif key == "experiment":
            defaults = [override.value(), *(entry for entry in defaults if isinstance(entry, dict))]
        else:
            choice = {f"override /{key}": override.value()}
            defaults = [entry for entry in defaults if not (isinstance(entry, dict) and entry.keys() == choice.keys())]
            defaults.append(choice)
    lines = ["# @package _global_", f"# {comment}"]
    lines += [f"# Not in this file, type it too: {text}" for text in removed]
    document = {"defaults": defaults} | values if defaults else values
    return "\n".join(lines) + "\n" + yaml.safe_dump(document, sort_keys=False, allow_unicode=True)


def _put(values: dict[str, Any], path: list[str], override: Override) -> None:
    for part in path[:-1]:
        values = values.setdefault(part, {})
    values[path[-1]] = override.value()
