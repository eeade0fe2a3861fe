"""A rank's row of numbers, and how late ranks are."""

import math
import random
from dataclasses import fields, replace

import pytest
import torch

from project.tracking.phases import PHASES
from project.tracking.windows import NUM_FIELDS, Window, lateness, merge, percentile, summarize_steps

MS = 1_000_000
WINDOW = Window(10, 640, 0.1, data=1, transfer=2, forward=3, backward=4, optimizer=0.5, other=0.25)


def test_times_are_means_per_step_in_milliseconds() -> None:
    steps = [10 * MS, 20 * MS, 30 * MS, 40 * MS]
    totals = dict.fromkeys(PHASES, 0) | {"data": 20 * MS, "forward": 80 * MS}
    window = summarize_steps(totals, steps, samples=256)
    assert (window.steps, window.samples, window.wall_s) == (4, 256, 0.1)
    assert (window.data, window.forward, window.other) == (5, 20, 0)
    assert window.step == 25
    assert (window.step_p50, window.step_p95, window.step_max) == (20, 40, 40)
    assert window.samples_per_s == pytest.approx(2560)


def test_known_waiting_is_taken_out_of_backward_and_the_sum_stays() -> None:
    parts = replace(WINDOW, sync=1.5).parts()
    assert (parts["backward"], parts["sync"]) == (2.5, 1.5)
    assert sum(parts.values()) == WINDOW.step
    assert "sync" not in WINDOW.parts()
    assert replace(WINDOW, sync=99).parts()["backward"] == 0


def test_a_window_crosses_ranks_as_one_tensor() -> None:
    packed = torch.tensor(WINDOW.packed(), dtype=torch.float64)
    assert len(packed) == NUM_FIELDS
    again = Window.unpacked(packed.tolist())
    for field in fields(Window):
        assert getattr(again, field.name) == pytest.approx(getattr(WINDOW, field.name), nan_ok=True), field.name


def test_merged_windows_weigh_by_their_steps() -> None:
    merged = merge([replace(WINDOW, sync=2), replace(WINDOW, steps=30, data=5, step_max=9, memory_bytes=7)])
    assert (merged.steps, merged.samples) == (40, 1280)
    assert merged.data == pytest.approx(4)
    assert merged.sync == 2  # where it is known
    assert merged.memory_bytes == 7
    assert math.isnan(merged.late)
    assert merge([]).steps == 0


@pytest.mark.parametrize(("share", "expected"), [(0.5, 2), (0.75, 3), (0.95, 4), (1.0, 4), (0.0, 1)])
def test_percentile_is_a_value_that_was_measured(share: float, expected: float) -> None:
    assert percentile([1, 2, 3, 4], share) == expected


def test_percentile_of_nothing_is_unknown() -> None:
    assert math.isnan(percentile([], 0.5))


STEP_S, COLLECTIVES = 0.1, 5


def arrivals(*delays_s: float, stays: bool = False, steps: int = 8) -> list[list[float]]:
    """Times at which ranks come to the collectives of some steps; each rank is late for the second of a step.

    Where its lag does not ``stay`` until the end of the step, all wait for each other there.
    """
    return [
        [
            STEP_S * step + 0.001 * number + (delay if number == 1 or (stays and number > 1) else 0.0)
            for step in range(steps)
            for number in range(COLLECTIVES)
        ]
        for delay in delays_s
    ]


@pytest.mark.parametrize("stays", [True, False])
@pytest.mark.parametrize(
    ("delays_s", "late_s"),
    [((0, 0.04), [0, 0.04]), ((0.02, 0, 0), [0.02, 0, 0]), ((0, 0, 0.01, 0.03), [0, 0, 0.01, 0.03])],
)
def test_a_rank_is_late_by_what_it_holds_the_others_up(
    delays_s: tuple[float, ...], late_s: list[float], stays: bool
) -> None:
    shares = lateness(arrivals(*delays_s, stays=stays))
    assert [share * STEP_S for share in shares] == pytest.approx(late_s, rel=0.2, abs=1e-4)


def test_noise_that_all_ranks_have_is_no_lateness() -> None:
    draw = random.Random(1)
    noisy = [[time + draw.uniform(0, 0.01) for time in times] for times in arrivals(0, 0, 0, steps=40)]
    assert max(lateness(noisy)) < 0.1


def test_lateness_of_one_rank_or_of_nothing_is_unknown() -> None:
    assert [math.isnan(value) for value in lateness([[1.0]]) + lateness([[], []])] == [True] * 3
