"""What to type for a key that the config does not have: an argument of its class, or a key of another choice."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError

from project.config.build import argument_names, locate
from project.config.composition import composed_again, config_folder, key_hint, register_resolvers, walk
from project.config.preflight import OF_SCHEDULE
from project.errors import nearest

TRAINER = "lightning.Trainer"


@dataclass(frozen=True)
class Owner:
    """The class whose argument a key would be.

    Attributes:
        target: Its ``_target_``.
        arguments: The names that it takes.
        is_open: Whether it may take others, by ``**kwargs``.
    """

    target: str
    arguments: tuple[str, ...]
    is_open: bool

    def takes(self, name: str) -> bool | None:
        """Whether it takes an argument of that name; None where only a call would tell."""
        return True if name in self.arguments else None if self.is_open else False


def owner_of(key: str, arguments: Sequence[str]) -> Owner | None:
    """The class that was typed for the place of a dotted key; None where none was, or none that can be imported.

    What the config itself has there is not looked at, but for the Trainer, whose source can be read: that would import
    torch, to say that a key is misspelt.
    """
    parent = key.rpartition(".")[0]
    target = _typed(arguments).get(f"{parent}._target_", "").strip("'\"")
    if not target:
        return _trainer() if parent == "trainer" else None
    try:
        names, is_open = argument_names(locate(target, parent))
    except Exception:  # whatever a module of the user's raises: the run will tell
        return None
    return Owner(target, (*names, *(OF_SCHEDULE if parent == "scheduler" else ())), is_open)


def _trainer() -> Owner | None:
    """Lightning's Trainer, where the config has no other, without the import of torch that goes with it."""
    targets = [
        OmegaConf.select(OmegaConf.load(path), "_target_") for path in (config_folder() / "trainer").glob("*.yaml")
    ]
    spec = importlib.util.find_spec("lightning")
    if set(targets) != {TRAINER} or spec is None or spec.origin is None:
        return None
    try:
        tree = ast.parse((Path(spec.origin).parent / "pytorch/trainer/trainer.py").read_text(encoding="utf-8"))
    except OSError:  # another version of it has another place
        return None
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Trainer"]
    methods = [node for found in classes for node in found.body if isinstance(node, ast.FunctionDef)]
    taken = [node.args for node in methods if node.name == "__init__"]
    names = [argument.arg for one in taken for argument in (*one.args[1:], *one.kwonlyargs)]
    return Owner(TRAINER, tuple(names), is_open=False) if names else None


def advice(key: str, keys: list[str], config_name: str, arguments: Sequence[str]) -> str:
    """What follows on ``KEY is not in the config``.

    Of a class that was typed only what it takes is offered; what others take is not known without importing torch.

    Args:
        key: Dotted, as typed.
        keys: What else it may have been meant for.
        config_name: Of the command.
        arguments: As typed.
    """
    parent, _, name = key.rpartition(".")
    value = _typed(arguments).get(key, "VALUE")
    owner = owner_of(key, arguments)
    if owner is None or name.startswith("_"):
        if other := _other_choice(key, value, config_name, arguments):
            return other
        hint = key_hint(key, [known for known in keys if not key.startswith(f"{known}.")])
        return f"{hint or '.'} To add a new key type +{key}={value}"
    takes = owner.takes(name)
    if owner.target == TRAINER and sum(known.rpartition(".")[2] == name for known in keys) == 1:
        return key_hint(key, keys)  # a key of that name stands elsewhere
    if takes is not False:
        return f", and {owner.target} {'takes' if takes else 'may take'} it: type +{key}={value}"
    if near := nearest(name, owner.arguments):
        known = f"{parent}.{near}"
        return f": did you mean {known if known in keys else f'+{known}'}?"
    or_add = "" if owner.target == TRAINER else f", or give the class an argument {name}"
    return f", and {owner.target} takes no {name}: leave it out{or_add}"


def in_config_already(key: str, arguments: Sequence[str]) -> str:
    """The sentence for ``+key=value`` of a key that is there."""
    value = _typed(arguments).get(key, "VALUE")
    owner = owner_of(key, arguments)
    name = key.rpartition(".")[2]
    if owner and owner.takes(name) is False:
        return f"+{key}={value} can't be added, {owner.target} takes no {name}: leave it out"
    return f"{key} is in the config already, and + adds keys that are not: type {key}={value}"


def _typed(arguments: Sequence[str]) -> dict[str, str]:
    return dict(argument.lstrip("+").partition("=")[::2] for argument in arguments)


def _other_choice(key: str, value: str, config_name: str, arguments: Sequence[str]) -> str | None:
    """The choices of the key's group that have it, and what to type for one with which the config is complete.

    A choice that leaves the key's value open is the one whose purpose it is.
    """
    parts = key.split(".")
    for depth in range(len(parts) - 1, 0, -1):
        group = "/".join(parts[:depth])
        having = dict(_having(group, ".".join(parts[depth:])))
        for choice in sorted(having, key=lambda name: not having[name]):
            typed = [f"{group}={_beside(_typed(arguments).get(group, ''), choice)}", f"{key}={value}"]
            kept = [text for text in arguments if "=" in text and not text.startswith((f"{group}=", f"{key}="))]
            kept = [text for text in kept if (config_folder() / _name(text)).is_dir() or "._target_=" in text]
            if _is_complete(config_name, [*kept, *typed]):
                have = f"{', '.join(having)} have" if len(having) > 1 else f"{choice} has"
                return f", but {group}={have} it: type {' '.join(typed)}"
    return None


def _name(argument: str) -> str:
    return argument.lstrip("+").partition("=")[0]


def _beside(chosen: str, choice: str) -> str:
    """Another choice of a group, in the list where one was typed."""
    return f"{chosen[:-1]},{choice}]" if chosen.startswith("[") else choice


def _having(group: str, rest: str) -> Iterator[tuple[str, bool]]:
    """Choices of a group that have a key, and whether they leave its value open (``???``)."""
    for path in sorted((config_folder() / group).glob("*.yaml")):
        node: Any = OmegaConf.load(path)
        if isinstance(node, DictConfig) and rest in walk(node):
            inner, _, name = rest.rpartition(".")
            yield path.stem, OmegaConf.is_missing(OmegaConf.select(node, inner) if inner else node, name)


def _is_complete(config_name: str, overrides: list[str]) -> bool:
    """Whether a config composes and the model finds in it what it reads."""
    # Facts would import torch, and read the data.
    OmegaConf.register_new_resolver("fact", lambda *_: 1, replace=True)
    try:
        OmegaConf.to_container(composed_again(config_name, overrides).model, resolve=True)
    except (HydraException, InterpolationKeyError):
        return False
    finally:
        register_resolvers()
    return True
