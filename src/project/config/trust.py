"""Whose code a config may run that came from elsewhere."""

from __future__ import annotations

import contextlib
import hmac
import inspect
import json
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from project.config.build import locate
from project.config.composition import config_folder
from project.config.preflight import targets
from project.errors import UserError


def trusted_packages(typed: Any = None) -> list[str]:
    """What ``launch.trusted_targets`` of this machine's configs lists, and ``typed`` on the command line."""
    own = OmegaConf.load(config_folder() / "launch" / "default.yaml").trusted_targets
    return [__name__.partition(".")[0], *own, *(typed if isinstance(typed, list) else [typed] if typed else [])]


def signature(config: Any) -> str | None:
    """What shows later that this user ran a config here; None where no key can be kept.

    The key lies in ``~/.config/project``, and leaves this machine with nothing.
    """
    path = Path.home() / ".config" / "project" / "key"
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            beside = path.with_name(f"key.{os.getpid()}")
            beside.touch(mode=0o600)
            beside.write_text(secrets.token_hex(32))
            with contextlib.suppress(FileExistsError):
                os.link(beside, path)  # the first of several processes wins
            beside.unlink()
        key = path.read_text()
    except (OSError, RuntimeError):
        return None
    text = json.dumps(config, sort_keys=True, default=str)
    return hmac.new(key.encode(), text.encode(), "sha256").hexdigest()


def check_targets(config: Any, source: str, trusted: Sequence[str]) -> None:
    """Check that a stored config names only classes and functions of packages that are trusted.

    Args:
        config: With ``_target_`` at any depth.
        source: Where it comes from.
        trusted: Packages, or names in them. What counts is where a class is defined: a trusted module leads to many
            others that it imports.

    Raises:
        UserError: it names something else, which building the config would run.
    """
    for key, target in targets(config):
        if not _lies_in(target, trusted):
            raise _untrusted(key, target, source)
        found = locate(target, key)  # imports trusted modules only
        home = str(getattr(found, "__module__", ""))
        if not (inspect.isclass(found) or inspect.isroutine(found)) or not _lies_in(home, _homes(trusted)):
            raise _untrusted(key, target, source)


def _homes(trusted: Sequence[str]) -> list[str]:
    """Packages may define elsewhere what they offer: lightning.Trainer lies in lightning.pytorch.trainer."""
    return [name.partition(".")[0] for name in trusted]


def _lies_in(name: str, packages: Sequence[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _untrusted(key: str, target: str, source: str) -> UserError:
    package = target.partition(".")[0]
    return UserError(
        f"the config in {source} would run {target} ({key}), which is not among this machine's trusted_targets: if you "
        f"know who wrote it, type launch.trusted_targets=[{package}], or add it in conf/launch/default.yaml"
    )
