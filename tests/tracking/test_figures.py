"""Pictures of all ranks."""

import torch

from project.tracking.figures import BusyHistory, bars, heat_map
from project.tracking.windows import Ranks, Window


def of_ranks(number: int) -> Ranks:
    return Ranks.of(
        [Window(steps=1, samples=1, wall_s=1, data=1, forward=2 + rank, backward=4, sync=1) for rank in range(number)]
    )


def test_bars_are_the_parts_of_each_ranks_step() -> None:
    (axes,) = bars(of_ranks(2)).axes
    heights = {container.get_label(): [bar.get_height() for bar in container] for container in axes.containers}
    assert heights["forward"] == [2, 3]
    assert (heights["backward"], heights["sync"]) == ([3, 3], [1, 1])
    assert [bar.get_y() + bar.get_height() for bar in axes.containers[-1]] == [7, 8]


def test_many_ranks_are_areas() -> None:
    (axes,) = bars(of_ranks(1000)).axes
    assert len(axes.patches) == 0
    assert len(axes.collections) == len(of_ranks(1000).parts())


def test_history_keeps_all_of_a_short_training() -> None:
    history = BusyHistory(columns=8)
    for step in range(1, 8):
        history.add(step, torch.tensor([step, 2.0 * step], dtype=torch.float64))
    assert history.steps() == list(range(1, 8))
    assert history.busy_ms()[1].tolist() == [2.0 * step for step in range(1, 8)]


def test_history_of_a_long_training_is_bounded_and_covers_all_of_it() -> None:
    history = BusyHistory(columns=8)
    number = 1000
    for step in range(number):
        history.add(step, torch.tensor([float(step)], dtype=torch.float64))
    steps, busy = history.steps(), history.busy_ms()[0]
    assert 4 <= len(steps) <= 8
    width = steps[1] - steps[0]
    assert number - steps[-1] <= width
    # A column is the mean of the windows in it.
    assert busy.tolist() == [step - (width - 1) / 2 for step in steps]


def test_the_heat_map_has_a_row_a_rank() -> None:
    history = BusyHistory()
    for step in (100, 200, 300):
        history.add(step, torch.tensor([1.0, 2.0], dtype=torch.float64))
    axes = heat_map(history).axes[0]
    assert axes.images[0].get_array().shape == (2, 3)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["100", "200", "300"]
