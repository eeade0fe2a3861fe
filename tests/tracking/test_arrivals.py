"""What the flight recorder tells of collectives, and what is known of those of other ranks."""

import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist

from project.tracking import arrivals as module
from project.tracking.arrivals import KEPT, NUM_ARRIVALS, OWN_GROUP, Arrivals, Marks, arrivals, of_entries

Entry = tuple[int, str, int, str]


class Clock:
    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        return self.ns


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def marks(clock: Clock) -> Marks:
    return Marks(clock)


def entries(*times_ns: int, kind: str = "gloo:all_reduce", group: str = "0") -> list[Entry]:
    return [(time_ns, kind, number, group) for number, time_ns in enumerate(times_ns)]


def run_backward(marks: Marks, clock: Clock, start_ns: int, end_ns: int) -> None:
    clock.ns = start_ns
    marks.begin_backward()
    clock.ns = end_ns
    marks.end_backward()


def test_buckets_of_one_backward_are_not_waited_for_and_its_end_is(marks: Marks, clock: Clock) -> None:
    run_backward(marks, clock, 10, 40)
    run_backward(marks, clock, 110, 140)
    came = of_entries(entries(20, 30, 120, 130), marks)
    assert came.waits == (False, True, False)
    assert came.follows == (True, True, True)


def test_other_collectives_within_backward_are_waited_for(marks: Marks, clock: Clock) -> None:
    """FSDP's, whose weights are needed at once."""
    run_backward(marks, clock, 10, 40)
    assert of_entries(entries(20, 30, kind="gloo:all_gather"), marks).waits == (True,)


def test_what_lies_around_a_standstill_is_no_training(marks: Marks, clock: Clock) -> None:
    clock.ns = 25
    marks.pause()
    marks.pause()  # validation, and a checkpoint in it
    clock.ns = 100
    marks.resume()
    marks.resume()
    assert of_entries(entries(10, 20, 110, 120), marks).follows == (True, False, True)


def test_a_long_window_remembers_its_last_backwards(marks: Marks, clock: Clock) -> None:
    for number in range(5000):
        run_backward(marks, clock, 100 * number, 100 * number + 50)
    assert marks.backward_of(100 * 4999 + 20) is not None
    assert marks.backward_of(100 * 4999 + 70) is None
    assert marks.backward_of(20) is None  # long ago


def of_ranks(*came: Arrivals) -> Any:
    return came[0].of_all(torch.tensor([rank.packed() for rank in came], dtype=torch.float64))


def test_arrivals_cross_ranks_as_one_row_each(marks: Marks) -> None:
    known = of_ranks(of_entries(entries(10**9, 2 * 10**9), marks), of_entries(entries(10**9, 5 * 10**9), marks))
    came_s, waits, follows, groups = known
    assert came_s.tolist() == [[1, 2], [1, 5]]
    assert waits.tolist() == follows.tolist() == [True]
    assert groups is None  # all meet
    assert len(Arrivals().packed()) == NUM_ARRIVALS


def test_ranks_of_other_groups_in_the_same_program_are_known_by_their_groups(marks: Marks) -> None:
    known = of_ranks(*(of_entries(entries(10, 20, group=group), marks) for group in ("1", "1", "2", "2")))
    groups = known[3]
    assert (groups[0] == groups[1]).all()
    assert (groups[1] != groups[2]).all()


def test_ranks_that_did_not_do_the_same_are_unknown(marks: Marks) -> None:
    more = of_entries(entries(10, 20, 30), marks)
    assert of_ranks(more, of_entries(entries(10, 20), marks)) is None
    assert of_ranks(more, Arrivals()) is None
    assert of_ranks(Arrivals(), Arrivals()) is None


def recorded(monkeypatch: pytest.MonkeyPatch, *dumped: dict[str, Any]) -> None:
    monkeypatch.setattr(module, "_dump", lambda: lambda *_: pickle.dumps({"entries": dumped}))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)


def entry(number: int, time_ns: int, group: str = "default_pg", is_p2p: bool = False) -> dict[str, Any]:
    return {
        "process_group": ["0", group], "collective_seq_id": number, "time_created_ns": time_ns,
        "profiling_name": "gloo:broadcast", "is_p2p": is_p2p,
    }  # fmt: skip


def test_only_collectives_of_training_in_this_window_count(
    marks: Marks, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock.ns = 100
    marks.begin_window()
    clock.ns = 200
    marks.pause()
    clock.ns = 300
    marks.resume()
    recorded(
        monkeypatch, entry(1, 50), entry(2, 150), entry(3, 250), entry(4, 350), entry(5, 360, OWN_GROUP),
        entry(6, 370, is_p2p=True),
    )  # fmt: skip
    assert [round(1e9 * time_s) for time_s in arrivals(marks).came_s] == [150, 350]


def test_the_last_of_many_are_kept(marks: Marks, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(monkeypatch, *(entry(number, 10 + number) for number in range(KEPT + 50)))
    came = arrivals(marks)
    assert len(came.came_s) == KEPT
    assert round(1e9 * came.came_s[-1]) == 10 + KEPT + 49


@pytest.mark.parametrize("dumped", [b"no pickle", pickle.dumps({}), pickle.dumps({"entries": [{}]})])
def test_a_recorder_that_tells_something_else_is_no_error(
    dumped: bytes, marks: Marks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_dump", lambda: lambda *_: dumped)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    assert arrivals(marks).came_s == ()


def test_without_ranks_nothing_is_known(marks: Marks) -> None:
    assert arrivals(marks).came_s == ()


def test_torch_has_the_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is private; where a new torch lacks it, who is late is concluded from DDP's own times."""
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    assert module._dump() is not None


def test_under_nccl_its_own_recorder_is_read(marks: Marks, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one has what our groups of the CPU sent, and nothing of the training."""
    nccl = entry(1, 50) | {"profiling_name": "nccl:_all_gather_base"}
    for name, dumped in (("_dump_nccl_trace", [nccl]), ("_dump_fr_trace", [entry(1, 40, OWN_GROUP)])):
        monkeypatch.setattr(
            torch._C._distributed_c10d, name, lambda *_, dumped=dumped: pickle.dumps({"entries": dumped}), raising=False
        )
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    assert [round(1e9 * time_s) for time_s in arrivals(marks).came_s] == [50]


def test_programs_differ_by_kind_and_number(marks: Marks) -> None:
    made = (entries(1, 2), entries(1, 2, 3), entries(1, 2, kind="gloo:broadcast"))
    assert len({of_entries(each, marks).program for each in made}) == 3
