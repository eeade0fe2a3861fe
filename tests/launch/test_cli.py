"""The command line, before Hydra reads it."""

import re
from pathlib import Path

import pytest

import project
from project.launch.cli import flags_first


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        (["train", "a=1", "-m", "b=1,2"], ["train", "-m", "a=1", "b=1,2"]),
        (["train", "a=1", "--multirun"], ["train", "--multirun", "a=1"]),
        (["train", "a=1", "--cfg", "job"], ["train", "a=1", "--cfg", "job"]),
    ],
)
def test_several_jobs_can_be_asked_for_at_any_place(typed: list[str], read: list[str]) -> None:
    flags_first(typed)
    assert typed == read


def test_nothing_is_asked_on_standard_input() -> None:
    """A prompt would hang a batch job; the tests of commands have no input that it could read either."""
    asks = re.compile(r"(?<![\w.])input\(|\bgetpass\b|\b(Prompt|Confirm)\b|\bsys\.stdin\b")
    sources = list(Path(project.__file__).parent.rglob("*.py"))
    assert len(sources) > 100
    assert [path.name for path in sources if asks.search(path.read_text())] == []
