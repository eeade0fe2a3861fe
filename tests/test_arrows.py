"""Which package may know of which: what is below can be read, tested and taken elsewhere without what is above."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import project

SOURCE = Path(project.__file__).parent
KNOWS = {
    "data": set(),
    "models": set(),
    "tracking": set(),
    "checkup": set(),
    "strategies": {"models", "tracking"},  # a net's parallel plan; the name of groups that are not looked at
    "compression": {"strategies", "tracking"},
    "config": {"strategies", "compression", "launch", "training"},  # defaults of a run; a checkpoint's config
    "launch": {"config", "strategies", "tracking", "data", "sweep"},  # plugins that Hydra finds
    "training": {"launch", "config", "strategies", "tracking", "data", "sweep"},  # a search's trials end early
    "sweep": {"launch", "config"},
}


def imported(package: str) -> Iterator[tuple[str, str]]:
    for path in (SOURCE / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                yield from ((path.name, f"{node.module}.{alias.name}") for alias in node.names)
            elif isinstance(node, ast.Import):
                yield from ((path.name, alias.name) for alias in node.names)


@pytest.mark.parametrize("package", KNOWS)
def test_packages_import_only_what_is_below(package: str) -> None:
    prefix = f"{SOURCE.name}."
    own = [(file, name.split(".")[1]) for file, name in imported(package) if name.startswith(prefix)]
    packages = {(file, name) for file, name in own if (SOURCE / name).is_dir()}
    assert {(file, name) for file, name in packages if name not in KNOWS[package] | {package}} == set()


def test_every_package_has_its_place() -> None:
    tops = {"benchmarking"}  # above all others
    assert {path.parent.name for path in SOURCE.glob("*/__init__.py")} == KNOWS.keys() | tops


@pytest.mark.parametrize("module", ["phases", "windows", "diagnosis", "remedies", "charts", "progress", "lateness"])
def test_the_core_of_tracking_knows_no_lightning(module: str) -> None:
    names = [name for file, name in imported("tracking") if file == f"{module}.py"]
    assert names
    assert [name for name in names if name.split(".")[0] == "lightning"] == []
