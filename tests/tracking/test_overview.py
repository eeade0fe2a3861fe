"""Windows of all ranks, one after another: who is late, what persists, and what it costs."""

import math
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from project.tracking.arrivals import Arrivals, Marks, of_entries
from project.tracking.dashboard import Dashboard
from project.tracking.overview import PERSISTS, Overview
from project.tracking.remedies import Facts
from project.tracking.windows import NUM_FIELDS, Window

BALANCED = Window(
    steps=20, samples=640, wall_s=0.4, data=0.1, transfer=0.1, forward=6, backward=12, optimizer=1.5, other=0.3
)
SLOW_LOADER = replace(BALANCED, data=20)
SECOND = 1_000_000_000


def row(window: Window, came: Arrivals = Arrivals()) -> list[float]:  # noqa: B008
    return [*window.packed(), *came.packed()]


def rows_of(*windows: Window) -> Tensor:
    return torch.tensor([row(window) for window in windows], dtype=torch.float64)


def test_who_is_late_comes_from_the_times_at_which_ranks_met() -> None:
    """Each second all meet; rank 1 comes 0.2 s after the others."""
    marks = Marks(lambda: 0)
    came = [
        of_entries([(SECOND * second + late, "gloo:all_reduce", second, "0") for second in range(1, 9)], marks)
        for late in (0, SECOND // 5, 0)
    ]
    rows = torch.tensor([row(BALANCED, arrivals) for arrivals in came], dtype=torch.float64)
    overview = Overview(pytest.fail)
    overview.add(20, rows, came[0], Facts())
    assert overview.ranks is not None
    assert overview.ranks["late"].tolist() == pytest.approx([0, 4, 0], rel=0.01)  # 0.2 of a step of 20 ms
    assert rows[:, :NUM_FIELDS].isnan().sum() > 0  # what was gathered is left as it is


def test_who_is_late_is_unknown_where_nothing_was_recorded() -> None:
    overview = Overview(pytest.fail)
    overview.add(20, rows_of(BALANCED, BALANCED), Arrivals(), Facts())
    assert overview.ranks is not None
    assert overview.ranks["late"].isnan().all()


def test_a_starving_input_that_persists_is_warned_of_once(tmp_path: Path) -> None:
    told: list[str] = []
    dashboard = Dashboard(tmp_path)
    overview = Overview(told.append, dashboard)
    for step in range(3 * PERSISTS):
        assert len(told) == (step >= PERSISTS)
        overview.add(step, rows_of(SLOW_LOADER), Arrivals(), Facts())
    (text,) = told
    assert text.startswith("bound by input: ")
    dashboard.close()
    events = EventAccumulator(str(tmp_path / "all")).Reload()
    assert [point.step for point in events.Tensors("warning/text_summary")] == [PERSISTS - 1]


@pytest.mark.parametrize(
    "windows",
    [
        pytest.param([SLOW_LOADER, SLOW_LOADER, BALANCED] * 5, id="comes_and_goes"),
        pytest.param([replace(BALANCED, data=2.5)] * 10, id="costs_little"),
        pytest.param([replace(BALANCED, other=30)] * 10, id="is_no_fault_of_data_or_rank"),
    ],
)
def test_nothing_else_is_warned_of(windows: list[Window]) -> None:
    overview = Overview(pytest.fail)
    for step, window in enumerate(windows):
        overview.add(step, rows_of(window), Arrivals(), Facts())


def test_the_verdict_at_the_end_is_on_all_windows() -> None:
    overview = Overview(pytest.fail)
    assert overview.judge(0, Facts()) is None
    for step, window in enumerate([BALANCED, SLOW_LOADER, BALANCED]):
        overview.add(step, rows_of(window), Arrivals(), Facts())
    verdict = overview.judge(3, Facts())
    assert verdict is not None
    assert verdict.bound == "input"
    assert verdict.gain == pytest.approx(1 / (1 - 20.2 / (60 + 19.9)), rel=0.01)


def test_few_steps_are_not_judged() -> None:
    overview = Overview(pytest.fail)
    overview.add(1, rows_of(replace(BALANCED, steps=4)), Arrivals(), Facts())
    assert overview.judge(1, Facts()) is None


def test_a_window_of_a_thousand_ranks_takes_some_milliseconds(tmp_path: Path) -> None:
    num_ranks = 1024
    came = [
        of_entries([(SECOND * n + rank, "gloo:all_reduce", n, str(rank % 8)) for n in range(128)], Marks(lambda: 0))
        for rank in range(num_ranks)
    ]
    rows = torch.tensor([row(replace(BALANCED, late=math.nan), each) for each in came], dtype=torch.float64)
    dashboard = Dashboard(tmp_path, num_replicas=num_ranks)
    overview = Overview(lambda _: None, dashboard)
    took_s = []
    for step in range(6):
        start = time.thread_time()  # others may be at work on this machine
        overview.add(step, rows, came[0], Facts())
        took_s.append(time.thread_time() - start)
    dashboard.close()
    assert min(took_s) < 0.020
    assert len(list(tmp_path.iterdir())) == 1 + dashboard.max_rank_series
