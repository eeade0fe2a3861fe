"""Our sweepers and launchers among Hydra's."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins

from project.config.composition import config_folder
from project.errors import UserError
from project.sweep.jobs import quote
from project.sweep.record import FILE, read


def ask_for_several_jobs(arguments: list[str]) -> None:
    """Add ``--multirun`` where a search is typed: Hydra would only read it from a config that has no mistake."""
    searches = any(argument.startswith("sweep=") and argument != "sweep=grid" for argument in arguments)
    if searches and not any(argument.startswith("-") for argument in arguments[1:]):
        arguments.insert(1, "--multirun")


def go_on_with_sweep(arguments: list[str]) -> None:
    """Where ``resume=`` names the folder of a sweep, replace it by what was typed for that sweep.

    Raises:
        UserError: something else than Hydra's settings, such as the launcher, is typed beside it, or the folder of a
            sweep has no ``sweep.json``.
    """
    named = [argument for argument in arguments[1:] if argument.startswith("resume=")]
    folder = Path(named[-1].partition("=")[2].strip("'\"")) if named else None
    if folder is None or not (folder / FILE).is_file():
        if folder is not None and not (folder / "config.yaml").exists() and any(folder.glob("*/config.yaml")):
            raise UserError(
                f"resume={folder} holds runs, but no {FILE}, without which a sweep can't go on: type "
                f"resume={next(folder.glob('*/config.yaml')).parent} to go on with one run, or begin a new sweep"
            )
        return
    rest = [argument for argument in arguments[1:] if argument not in named and argument not in ("-m", "--multirun")]
    for argument in rest:
        if not argument.startswith(("hydra.", "hydra/", "-")):
            raise UserError(
                f"{argument} can't be: the sweep in {folder} goes on as it began: leave it out, or begin a new sweep"
            )
    sweep = read(folder)
    place = [f"hydra.sweep.dir={quote(str(folder.resolve()))}", "hydra.sweeper.goes_on=true"]
    arguments[1:] = ["--multirun", *sweep.typed, *(place if sweep.kind == "grid" else []), *rest]


def register_plugins() -> None:
    """Let ``hydra/sweeper`` and ``hydra/launcher`` name our classes, and our config files win over the plugins' own.

    Hydra takes plugins from the package ``hydra_plugins`` alone, which several distributions share. This project
    installs one top-level package only, so its classes are entered here under a name of that kind.
    """
    from project.sweep.search import OptunaSweeper
    from project.sweep.sweeper import PREFIX, GridSweeper

    known = Plugins.instance().class_name_to_class
    classes: list[Any] = [GridSweeper, OptunaSweeper]
    if importlib.util.find_spec("hydra_plugins") is not None:
        if importlib.util.find_spec("hydra_plugins.hydra_submitit_launcher") is not None:
            from project.sweep.slurm import SlurmLauncher

            classes.append(SlurmLauncher)
        if importlib.util.find_spec("hydra_plugins.hydra_ray_launcher") is not None:
            from project.sweep.ray import RayLauncher

            classes.append(RayLauncher)
    known.update({f"{PREFIX}.{found.__name__}": found for found in classes})
    # A plugin's own config of the same name would be taken for the schema of ours, with a warning.
    launchers = ConfigStore.instance().repo["hydra"]["launcher"]
    for path in (config_folder() / "hydra" / "launcher").glob("*.yaml"):
        launchers.pop(path.name, None)
