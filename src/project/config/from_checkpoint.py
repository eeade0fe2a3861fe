"""The config of a command that starts from a checkpoint: the checkpoint's own, with what was typed on top."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

from project.config.composition import config_folder
from project.config.trust import check_targets, signature, trusted_packages
from project.cpu import CoresTaken, choose_waiting
from project.errors import UserError
from project.launch.imports import import_for_good

# What a checkpoint's config decides. Devices and strategy are of the machine it is used on, not of the run.
FROM_RUN = ("name", "seed", "data", "model", "optimizer", "scheduler")
OF_MACHINE = ("accelerator", "devices", "num_nodes", "strategy", "profiler", "fast_dev_run", "overfit_batches")


def compose_from_checkpoint(name: str, arguments: list[str]) -> str:
    """Register the config ``<name>_checkpoint`` for Hydra and say its name.

    ``arguments`` are those of the command line. A group that is chosen there (``data=synthetic``) takes the place
    of the checkpoint's: it stands in the defaults without a choice, since Hydra lets only such groups be chosen.

    Raises:
        UserError: there is no ``ckpt_path``, or nothing can be read there.
    """
    quote_path(arguments, "ckpt_path")
    overrides = typed_overrides(arguments)
    if "ckpt_path" not in overrides:
        if any(argument.startswith("-") for argument in arguments[1:]):
            return name  # --help and its like need no checkpoint
        raise UserError(f"{name} needs a checkpoint: type ckpt_path=<run folder>/checkpoints/best.ckpt")
    path = overrides["ckpt_path"][1].value()
    if not isinstance(path, str) or overrides["ckpt_path"][1].is_sweep_override():
        raise UserError(
            f"ckpt_path={path} is no path: type ckpt_path=<run folder>/checkpoints/best.ckpt, one at a time"
        )

    # torch, which reads the checkpoint, is imported so soon that how busy others are has to be waited for.
    since = CoresTaken.until_now()
    time.sleep(0.1)
    choose_waiting(since)
    import_for_good("project.training.checkpoint")
    from project.training.checkpoint import read_signed_config

    stored, signed = read_signed_config(Path(path))
    trusted = overrides.get("launch.trusted_targets")
    node: dict[str, Any] = {key: stored[key] for key in FROM_RUN if key in stored}
    node["trainer"] = {key: value for key, value in stored["trainer"].items() if key not in OF_MACHINE}
    defaults: list[Any] = [name, "_self_"]
    # A group before the groups within it: model=... replaces all of the model, and names its own net for
    # model/net=... to replace.
    for group in sorted(overrides, key=lambda group: group.count("/")):
        outer, _, inner = group.rpartition("/")
        if group.partition("/")[0] not in FROM_RUN or not is_group(group) or {outer: None} in defaults:
            continue
        parent = node
        for part in outer.split("/") if outer else []:
            parent = parent[part]
        parent.pop(inner, None)
        defaults.append({group: None})
    if signed is None or signed != signature(stored):  # else this user ran it here
        check_targets(untyped(node, overrides), path, trusted_packages(trusted[1].value() if trusted else None))
    ConfigStore.instance().store(name=f"{name}_checkpoint", node={"defaults": defaults, **node})
    return f"{name}_checkpoint"


def untyped(node: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """What of a stored config no typed ``_target_`` takes the place of."""
    left = copy.deepcopy(node)
    for key in overrides:
        *outer, last = key.split(".")
        parent: Any = left
        for part in outer:
            parent = parent.get(part) if isinstance(parent, dict) else None
        if last == "_target_" and isinstance(parent, dict):
            parent.pop("_target_", None)
    return left


def typed_overrides(arguments: list[str]) -> dict[str, tuple[str, Override]]:
    """The overrides of a command line by their keys or groups: as typed, and as Hydra reads them."""
    overrides = {}
    for argument in arguments[1:]:
        if "=" in argument and not argument.startswith("-"):
            override = OverridesParser.create().parse_overrides([argument])[0]
            overrides[override.key_or_group] = (argument, override)
    return overrides


def quote_path(arguments: list[str], name: str) -> None:
    """Let a path be typed as it is shown: the folder of a sweep's job has = and , in its name, which Hydra reads."""
    for place, argument in enumerate(arguments):
        key, _, path = argument.partition("=")
        if key == name and Path(path).exists():
            quoted = path.replace("'", "\\'")
            arguments[place] = f"{name}='{quoted}'"


def is_group(group: str) -> bool:
    return (config_folder() / group).is_dir()
