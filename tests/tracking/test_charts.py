"""Curves over ranks, and the pages that show them."""

import json
import math
import re
import urllib.parse
from dataclasses import replace

import pytest
import torch

from project.tracking import charts
from project.tracking.diagnosis import Diagnosis
from project.tracking.windows import Ranks, Window

WINDOW = Window(
    steps=10, samples=640, wall_s=0.1, data=1, transfer=2, forward=3, backward=4, sync=1, tokens=6400,
    step_p50=10, step_p95=11, step_p99=12, step_max=13, late=0, buffers=1, shards=1,
)  # fmt: skip


def of_all(*windows: Window, num_replicas: int | None = None) -> dict[str, float]:
    return charts.of_all(charts.of_ranks(Ranks.of(windows)), num_replicas or len(windows))


def test_the_parts_of_a_step_sum_to_it() -> None:
    curves = charts.of_ranks(Ranks.of([WINDOW]))
    percents = [value for tag, value in curves.items() if tag.startswith("step_percent/")]
    assert float(sum(percents, torch.zeros(1))) == pytest.approx(100)
    assert float(curves["step_ms/backward"]) == 3


def test_what_is_done_in_a_second_adds_up_and_times_do_not() -> None:
    values = of_all(*[WINDOW] * 4)
    assert values["speed/samples_per_s"] == pytest.approx(4 * 6400)
    assert values["speed/tokens_per_s"] == pytest.approx(4 * 64000)
    assert values["speed/samples_per_s_and_device"] == pytest.approx(6400)
    assert values["speed/step_ms_p50"] == 10


def test_samples_that_several_ranks_compute_together_count_once() -> None:
    """Tensor parallelism: both ranks of a model read the same batch."""
    values = of_all(*[WINDOW] * 4, num_replicas=2)
    assert values["speed/samples_per_s"] == pytest.approx(2 * 6400)
    assert values["speed/samples_per_s_and_device"] == pytest.approx(3200)


def test_the_worst_is_that_of_any_rank_and_what_one_rank_does_not_know_is_left_out() -> None:
    values = of_all(replace(WINDOW, cpu=2), replace(WINDOW, step_max=99, late=5))
    assert (values["speed/step_ms_max"], values["speed/late_ms"], values["machine/cpu_cores"]) == (99, 5, 2)
    assert math.isnan(values["machine/gpu_watts"])


def test_bands_leave_out_what_is_not_known() -> None:
    spread = charts.spread(charts.of_ranks(Ranks.of([replace(WINDOW, late=late) for late in (math.nan, 4, 1, 2)])))
    assert [spread[f"ranks/late_ms_{end}"] for end in ("min", "median", "max")] == [1, 2, 4]
    assert math.isnan(spread["ranks/memory_GB_min"])


def test_nobody_holds_the_others_up() -> None:
    values = charts.of_straggler(Diagnosis("compute", ""), 0)
    assert values == {"straggler/rank": -1, "straggler/phase": -1, "straggler/factor": 1, "straggler/windows": 0}


def test_the_straggler_is_told_in_numbers() -> None:
    values = charts.of_straggler(Diagnosis("straggler", "", rank=3, phase="data", factor=2.5), 7)
    assert values == {"straggler/rank": 3, "straggler/phase": 0, "straggler/factor": 2.5, "straggler/windows": 7}
    assert charts.of_straggler(Diagnosis("straggler", "", rank=3), 7)["straggler/phase"] == -1


def test_every_chart_of_the_layout_has_curves() -> None:
    curves = charts.of_ranks(Ranks.of([WINDOW] * 2))
    tags = {*curves, *charts.spread(curves)}
    for category in charts.LAYOUT.values():
        for title, (kind, shown) in category.items():
            assert isinstance(shown, list)
            for tag in shown:
                found = tag in tags if kind == "Margin" else any(re.search(tag, name) for name in tags)
                assert found, f"{title}: {tag}"


def test_the_page_pins_cards_and_colours_ranks() -> None:
    url = urllib.parse.urlsplit(charts.page_url(6007))
    assert (url.netloc, url.fragment) == ("localhost:6007", "timeseries")
    query = dict(urllib.parse.parse_qsl(url.query))
    cards = json.loads(query["pinnedCards"])
    assert {"plugin": "scalars", "tag": "speed/samples_per_s"} in cards
    kind, _, pattern = query["runColorGroup"].partition(":")
    assert kind == "regex"
    groups = [re.search(pattern, run) for run in ("tensorboard/all", "tensorboard/rank_003")]
    assert [group and group[1] for group in groups] == ["all", "rank_003"]
