"""Files that are whole or absent."""

import stat
from pathlib import Path

import pytest

from project.files import beside, write_whole


def test_a_text_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_whole(path, "old")
    write_whole(path, "new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_an_interrupted_writer_leaves_the_old_file_and_nothing_beside(tmp_path: Path) -> None:
    path = tmp_path / "array"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), beside(path) as written, written.open("wb") as file:
        file.write(b"ne")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_two_writers_of_one_file_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    with beside(path) as slow:
        slow.write_text("sl")
        write_whole(path, "fast")
        slow.write_text("slow")
    assert path.read_text() == "slow"


def test_a_file_is_as_open_to_others_as_any(tmp_path: Path) -> None:
    write_whole(tmp_path / "whole", "")
    (tmp_path / "plain").touch()
    modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert len(modes) == 1
