"""Windows of all ranks: parts, sums, and what becomes of them over a training."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from project.tracking.phases import PHASES
from project.tracking.windows import FIELDS, NUM_FIELDS, Ranks, Window, percentile, summarize_steps

MS = 1_000_000
WINDOW = Window(steps=10, samples=640, wall_s=0.1, data=1, transfer=2, forward=3, backward=4, optimizer=0.5, other=0.25)


def numbers(values: Tensor) -> list[float]:
    return [float(value) for value in values]


def test_times_are_means_per_step_in_milliseconds() -> None:
    steps = [10 * MS, 20 * MS, 30 * MS, 40 * MS]
    totals = dict.fromkeys(PHASES, 0) | {"data": 20 * MS, "forward": 80 * MS}
    window = summarize_steps(totals, steps, samples=256)
    assert (window.steps, window.samples, window.wall_s) == (4, 256, 0.1)
    assert (window.data, window.forward, window.other) == (5, 20, 0)
    assert numbers(Ranks.of([window]).step()) == [25]
    assert (window.step_p50, window.step_p95, window.step_max) == (20, 40, 40)


def test_known_waiting_is_taken_out_of_backward_and_the_sum_stays() -> None:
    ranks = Ranks.of([replace(WINDOW, sync=1.5), replace(WINDOW, sync=99)])
    parts = ranks.parts()
    assert numbers(parts["backward"]) == [2.5, 0]
    assert numbers(parts["sync"]) == [1.5, 4]
    assert numbers(sum(parts.values(), torch.zeros(2))) == pytest.approx(numbers(ranks.step()))
    assert "sync" not in Ranks.of([WINDOW]).parts()


@pytest.mark.parametrize("name", ["buffers", "shards"])
def test_what_only_some_strategies_send_is_a_part_where_there_is_any(name: str) -> None:
    assert name not in Ranks.of([WINDOW]).parts()
    ranks = Ranks.of([replace(WINDOW, **{name: 2})])
    assert numbers(ranks.parts()[name]) == [2]
    assert numbers(ranks.step()) == [12.75]


def test_a_window_crosses_ranks_as_one_row() -> None:
    ranks = Ranks(torch.tensor([WINDOW.packed(), replace(WINDOW, data=7).packed()], dtype=torch.float64))
    assert ranks.rows.shape == (2, NUM_FIELDS)
    assert numbers(ranks["data"]) == [1, 7]
    again = ranks.of_rank(0)
    for name in FIELDS:
        assert getattr(again, name) == pytest.approx(getattr(WINDOW, name), nan_ok=True), name


def test_busy_is_the_step_without_waiting_for_others() -> None:
    """What all spend in communication is no waiting."""
    ranks = Ranks.of([replace(WINDOW, backward=24, sync=21), replace(WINDOW, data=21, sync=1)])
    assert numbers(ranks.step()) == [30.75, 30.75]
    assert numbers(ranks.busy()) == [10.75, 30.75]


def test_without_times_of_synchronisation_the_latest_is_waited_for() -> None:
    ranks = Ranks.of([replace(WINDOW, late=late) for late in (0, 4, 1)])
    assert numbers(ranks.waits()) == [4, 0, 3]


def test_merged_windows_weigh_by_their_steps() -> None:
    first = Ranks.of([replace(WINDOW, sync=2, tokens=3, step_max=20, memory_bytes=9)])
    second = Ranks.of([replace(WINDOW, steps=30, data=5, step_max=9, memory_bytes=7)])
    merged = first.merged(second).of_rank(0)
    assert (merged.steps, merged.samples, merged.tokens) == (40, 1280, 3)
    assert merged.data == pytest.approx(4)
    assert merged.sync == 2  # where it is known
    assert (merged.step_max, merged.memory_bytes) == (20, 7)
    assert math.isnan(merged.late)


def test_merging_one_by_one_is_the_mean_of_all() -> None:
    windows = [Ranks.of([replace(WINDOW, steps=steps, data=data)]) for steps, data in ((1, 5), (7, 2), (4, 9), (20, 1))]
    merged = windows[0]
    for window in windows[1:]:
        merged = merged.merged(window)
    assert merged.of_rank(0).data == pytest.approx((5 + 14 + 36 + 20) / 32)


def test_a_rank_without_steps_adds_nothing_and_keeps_its_place() -> None:
    empty = replace(WINDOW, steps=0, samples=0, wall_s=0, data=0, forward=0, backward=0)
    ranks = Ranks.of([empty, WINDOW])
    merged = ranks.merged(Ranks.of([WINDOW, empty]))
    assert numbers(merged["data"]) == [1, 1]
    assert numbers(merged["steps"]) == [10, 10]
    assert numbers(Ranks.of([replace(empty, sync=0), replace(WINDOW, sync=3)]).waits())[1] == 0


@pytest.mark.parametrize(("share", "expected"), [(0.5, 2), (0.75, 3), (0.95, 4), (1.0, 4), (0.0, 1)])
def test_percentile_is_a_value_that_was_measured(share: float, expected: float) -> None:
    assert percentile([1, 2, 3, 4], share) == expected


def test_percentile_of_nothing_is_unknown() -> None:
    assert math.isnan(percentile([], 0.5))
