"""What of a config and a command line nobody else should read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from project.errors import UserError

MASK = "***"
# Parts of a name: api_key and apiKey, not tokenizer nor keyboard.
SECRET = re.compile(r"(^|[^a-z])(token|key|password|passwd|secret|credentials?)([^a-z]|$)", re.IGNORECASE)
CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def is_secret(name: str) -> bool:
    """Whether a name says that its value is a token, key or password."""
    return bool(SECRET.search(CAMEL.sub("_", name)))


def masked(value: Any, name: str = "") -> Any:
    """A config, with the texts of secret names hidden; for everything that is written down."""
    if isinstance(value, dict):
        return {key: masked(child, str(key)) for key, child in value.items()}
    if isinstance(value, list):
        return [masked(child, name) for child in value]
    return MASK if isinstance(value, str) and value and is_secret(name) else value


def unmasked(config: Any, known: Any) -> Any:
    """A config with the secrets that were hidden in it, from one of the same keys that has them."""
    if isinstance(config, dict) and isinstance(known, dict):
        return {key: unmasked(child, known.get(key)) for key, child in config.items()}
    return known if config == MASK and isinstance(known, str) else config


def masked_arguments(arguments: Sequence[str]) -> list[str]:
    """A command line, with the values of secret names hidden: ``logger.api_key=***``, ``--token ***``."""
    shown: list[str] = []
    hides_next = False
    for argument in arguments:
        name, equals, value = argument.partition("=")
        last = name.rpartition(".")[2]
        if hides_next and not argument.startswith("-"):
            shown.append(MASK)
        elif equals and value and is_secret(last):
            shown.append(f"{name}={MASK}")
        else:
            shown.append(argument)
        hides_next = argument.startswith("--") and not equals and is_secret(argument)
    return shown


def check_unmasked(config: Any, source: str) -> None:
    """Check that no secret is missing that was not written down.

    Raises:
        UserError: one must be typed again.
    """
    for key in _masked_keys(config):
        raise UserError(f"{key} was not written into {source}, as secrets are not: type {key}=VALUE")


def _masked_keys(node: Any, key: str = "") -> list[str]:
    if isinstance(node, dict):
        return [k for name, child in node.items() for k in _masked_keys(child, f"{key}.{name}" if key else str(name))]
    return [key] if node == MASK and is_secret(key.rpartition(".")[2]) else []
