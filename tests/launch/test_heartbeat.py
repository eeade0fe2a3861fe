"""Signs of life that a rank writes and its launcher reads."""

import time
from pathlib import Path

import pytest

from project.launch.heartbeat import Beat, Heartbeats, Sign, describe_hang


def test_signs_of_each_rank_are_read_with_their_age(tmp_path: Path) -> None:
    heartbeats = Heartbeats(tmp_path / "beats", 3)
    beats = [Beat() for _ in range(3)]
    for rank, beat in enumerate(beats):
        beat.start(heartbeats.path, rank)
    beats[0](5, "computes")
    beats[2](6, "waits for data")
    time.sleep(0.05)
    first, last = heartbeats.read()
    assert (first.rank, first.step, first.phase) == (0, 5, "computes")
    assert (last.rank, last.step, last.phase) == (2, 6, "waits for data")
    assert 0.05 <= last.age_s <= first.age_s < 5
    beats[0].rest()
    assert [sign.rank for sign in heartbeats.read()] == [2]


def test_signs_of_ranks_that_have_ended_are_forgotten(tmp_path: Path) -> None:
    heartbeats = Heartbeats(tmp_path / "beats", 1)
    old = Beat()
    old.start(heartbeats.path, 0)
    heartbeats.clear()
    old(7, "computes")  # it may be slow to die
    assert heartbeats.read() == []


def test_process_that_nobody_watches_writes_nothing() -> None:
    beat = Beat()
    beat(1, "computes")
    beat.rest()


def test_a_sign_costs_a_few_microseconds(tmp_path: Path) -> None:
    beat = Beat()
    beat.start(Heartbeats(tmp_path / "beats", 1).path, 0)
    times = []
    for _ in range(20):
        began = time.perf_counter()
        for step in range(1000):
            beat(step, "computes")
        times.append((time.perf_counter() - began) / 1000)
    assert min(times) < 20e-6


@pytest.mark.parametrize("stopped", [True, False])
def test_rank_that_hangs_is_named_with_where_the_others_are(stopped: bool) -> None:
    signs = [Sign(0, 41, "computes", 61.0), Sign(1, 40, "waits for data", 65.0)]
    text = describe_hang(signs[1], signs, stopped)
    assert text.startswith("rank 1 hangs: it waits for data in step 40 for 65 s")
    assert ("its process is stopped (SIGSTOP)" in text) is stopped
    assert "(rank 0 computes in step 41 for 61 s)" in text
