"""The command line, before Hydra reads it."""

import pytest

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
