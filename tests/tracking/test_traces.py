"""What a trace may be asked for, and its file."""

import gzip
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from project.errors import UserError
from project.tracking.traces import NO_TABLE, Demand, Recorder, TracePlan, demanded


@pytest.mark.parametrize(
    ("text", "plan"),
    [
        ("", TracePlan()),
        ("active=5 ranks=[0,3]", TracePlan(active=5, ranks=(0, 3))),
        ("ranks=all\nwith_stack=true\n", TracePlan(ranks="all", with_stack=True)),
    ],
)
def test_file_says_what_differs_from_the_usual_plan(text: str, plan: TracePlan) -> None:
    assert demanded(text, TracePlan()) == plan


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("active=0", "active=0 of a trace can't be: type active= with a whole number from 1"),
        ("wait=soon", "wait=soon of a trace can't be: type wait= with a whole number from 0"),
        ("ranks=0", "ranks=0 of a trace can't be: type ranks=all, or a list of global ranks as [0,3]"),
        ("ranks=[]", "ranks=[] of a trace can't be"),
        ("ranks=[-1]", "ranks=[-1] of a trace can't be"),
        ("with_stack=1", "with_stack=1 of a trace can't be: type with_stack=true or with_stack=false"),
        ("activ=5", "activ= is nothing that a trace can be asked for with: did you mean active?"),
        ("ranks=[0,", "a trace can't be asked for by 'ranks=[0,': write active=5 ranks=[0,1], or nothing"),
    ],
)
def test_what_a_trace_can_not_be_asked_for_is_a_sentence(text: str, told: str) -> None:
    with pytest.raises(UserError) as error:
        demanded(text, TracePlan())
    assert str(error.value).startswith(told)


def test_rank_that_is_not_there_is_a_sentence() -> None:
    TracePlan(ranks=(0, 3)).check_ranks(4)
    with pytest.raises(UserError, match="this run has ranks 0 to 2: type ranks=all"):
        TracePlan(ranks=(0, 3)).check_ranks(3)


def test_demand_is_taken_once(tmp_path: Path) -> None:
    demand = Demand(tmp_path / "profile")
    assert not demand.is_there()
    demand.path.write_text("active=4")
    assert demand.is_there()
    assert demand.take() == "active=4"
    assert not demand.is_there()
    demand.path.touch()
    assert demand.is_there()


def test_demand_that_can_not_be_read_is_told_once(tmp_path: Path) -> None:
    demand = Demand(tmp_path / "profile")
    demand.path.mkdir()
    assert demand.is_there()
    with pytest.raises(UserError, match="profile can't be read and removed"):
        demand.take()
    assert not demand.is_there()


def recorded(plan: TracePlan, steps: range) -> Recorder:
    """One step before that warms up, the steps, and one after."""
    recorder = Recorder(plan, on_cuda=False)
    torch.ones(2, 2).cos()
    for step in steps:
        recorder.begin_step(step)
        recorder.spans.enter("forward")
        torch.ones(2, 2).sin()
        recorder.spans.leave()
    recorder.end()
    torch.ones(2, 2).tan()
    return recorder


def names_of(path: Path) -> list[str]:
    with gzip.open(path, "rt") as file:
        return [event["name"] for event in json.load(file)["traceEvents"] if "name" in event]


def test_trace_holds_its_steps_alone_with_their_numbers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    recorder = recorded(TracePlan(with_stack=True, record_shapes=True, profile_memory=True), range(7, 9))
    path = tmp_path / "traces" / "rank_000_step_000007.json.gz"
    recorder.save(path)
    names = names_of(path)
    assert sorted(name for name in names if name.startswith("ProfilerStep#")) == ["ProfilerStep#7", "ProfilerStep#8"]
    assert names.count("forward") == names.count("aten::sin") == 2
    assert not {"aten::cos", "aten::tan"} & set(names)
    assert list(path.parent.iterdir()) == [path]
    assert capfd.readouterr() == ("", "")
    assert "aten::sin" in recorder.table(rows=20) or recorder.table(rows=20) == NO_TABLE  # with_stack alone
    assert "aten::sin" in recorded(TracePlan(), range(2)).table(rows=20)


def test_names_that_the_profiler_cant_read_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(_: Any) -> None:
        b"\xa0".decode()

    recorder = recorded(TracePlan(), range(2))
    monkeypatch.setattr(type(recorder._profile), "key_averages", unreadable)
    assert recorder.table(rows=20) == NO_TABLE


def test_what_stands_still_between_steps_is_left_out(tmp_path: Path) -> None:
    recorder = Recorder(TracePlan(), on_cuda=False)
    recorder.begin_step(0)
    torch.ones(2).sin()
    recorder.record(False)
    torch.ones(2).cos()
    recorder.record(True)
    torch.ones(2).tan()
    recorder.end()
    recorder.save(tmp_path / "trace.json.gz")
    names = names_of(tmp_path / "trace.json.gz")
    assert {"aten::sin", "aten::tan"} < set(names)
    assert "aten::cos" not in names


def test_recorder_that_was_warming_up_can_be_ended_and_another_begun(tmp_path: Path) -> None:
    Recorder(TracePlan(), on_cuda=False).end()
    recorded(TracePlan(), range(1)).save(tmp_path / "trace.json.gz")
    assert "aten::sin" in names_of(tmp_path / "trace.json.gz")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], check=False).returncode:
        pytest.skip("mounting a file system is not allowed here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_trace_for_which_there_is_no_room_is_absent(small_disk: Path) -> None:
    recorder = recorded(TracePlan(), range(300))
    with pytest.raises(OSError, match="could not be written, 0 MiB are free"):
        recorder.save(small_disk / "trace.json.gz")
    assert list(small_disk.iterdir()) == []
