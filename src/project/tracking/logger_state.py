"""What a logger must find again when its run goes on, such as the run's name at a service: a file in the run folder."""

from __future__ import annotations

import json
from pathlib import Path

from project.files import write_whole


def keep(run_dir: str, name: str, **facts: str) -> None:
    """Write ``<run_dir>/<name>.json``."""
    write_whole(Path(run_dir, f"{name}.json"), json.dumps(facts, indent=2) + "\n")


def kept(run_dir: str, name: str) -> dict[str, str]:
    """What ``keep`` wrote; empty where it wrote nothing."""
    path = Path(run_dir, f"{name}.json")
    facts: dict[str, str] = json.loads(path.read_text()) if path.is_file() else {}
    return facts


def title(run_dir: str) -> str:
    """A run's name for people: the last two folders of its path, as ``digits_mlp/2026-01-01_12-00-00``."""
    return "/".join(Path(run_dir).parts[-2:])
