"""What the data say of themselves, for the configs that must know it: ``${fact:num_classes}``."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from omegaconf import DictConfig, OmegaConf

from project.errors import UserError


def fact(name: str, *, _parent_: DictConfig) -> Any:
    """A fact that the data module which this config node describes finds in its files, by its method ``facts``.

    It is looked for once, by the process that composes the config: ranks and checkpoints get the value.

    Raises:
        UserError: the class has no such fact, or its files are not what they should be.
    """
    node = {str(key): _plain(_parent_[key]) for key in _parent_ if not _asks_for_fact(_parent_, str(key))}
    facts = _facts(json.dumps(node))
    if name not in facts:
        raise UserError(
            f"{node['_target_']} has no fact {name}, which its config asks for: give the key a value, or the class a "
            "method facts"
        )
    return facts[name]


def _asks_for_fact(parent: DictConfig, key: str) -> bool:
    node: Any = parent._get_node(key)  # itself: to look at its value would be to ask
    return OmegaConf.is_interpolation(parent, key) and "${fact:" in str(node._value())


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


@lru_cache(maxsize=8)  # a config is resolved several times, and each fact asks
def _facts(node: str) -> dict[str, Any]:
    from project.config.build import build
    from project.config.preflight import check_installed, targets

    config = {"data": json.loads(node)}
    for key, target in targets(config):
        check_installed(key, target)
    datamodule = build(config, "data")
    facts: dict[str, Any] = datamodule.facts() if hasattr(datamodule, "facts") else {}
    return facts
