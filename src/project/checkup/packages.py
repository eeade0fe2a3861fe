"""Python and the installed packages: are they there, and do their versions fit each other?"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterator
from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement

from project.checkup.finding import Finding, Status

PROJECT = __name__.partition(".")[0]


def check() -> Iterator[Finding]:
    """Python, each package that the project needs, and every pair of packages that don't fit."""
    yield Finding("Python", f"{platform.python_version()} ({sys.executable})")
    try:
        own = _needed_by(PROJECT, metadata.requires)
    except metadata.PackageNotFoundError:
        yield Finding(PROJECT, "not installed", Status.BROKEN, "pip install -e .")
        return
    for requirement in own:
        yield _installed(requirement)
    yield from conflicts(PROJECT, metadata.requires, _version)


def _installed(requirement: Requirement) -> Finding:
    version = _version(requirement.name)
    if version is None:
        return Finding(requirement.name, "not installed", Status.BROKEN, f'pip install "{_plain(requirement)}"')
    if not requirement.specifier.contains(version, prereleases=True):
        value = f"{version}, and {requirement.specifier} is needed"
        return Finding(requirement.name, value, Status.BROKEN, f'pip install "{_plain(requirement)}"')
    return Finding(requirement.name, version)


def conflicts(
    root: str, requires: Callable[[str], list[str] | None], version_of: Callable[[str], str | None]
) -> Iterator[Finding]:
    """What packages beneath ``root`` need of one another and don't have; ``root``'s own needs are left out.

    Args:
        root: A distribution.
        requires: Its and others' requirements, as ``importlib.metadata.requires``.
        version_of: The installed version, or None.
    """
    seen = {root.lower()}
    waiting = [requirement.name for requirement in _needed_by(root, requires)]
    while waiting:
        name = waiting.pop()
        if name.lower() in seen or version_of(name) is None:
            continue
        seen.add(name.lower())
        for requirement in _needed_by(name, requires):
            waiting.append(requirement.name)
            version = version_of(requirement.name)
            if version is None or not requirement.specifier.contains(version, prereleases=True):
                yield Finding(
                    name,
                    f"{version_of(name)} needs {_plain(requirement)}, and {version or 'none'} is installed",
                    Status.WARNING,
                    f'pip install "{_plain(requirement)}"',
                )


def _needed_by(name: str, requires: Callable[[str], list[str] | None]) -> list[Requirement]:
    needed = []
    for text in requires(name) or []:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:  # of an old package; pip ignores it too
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            needed.append(requirement)
    return needed


def _plain(requirement: Requirement) -> str:
    return f"{requirement.name}{requirement.specifier}"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
