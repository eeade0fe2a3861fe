"""What TensorBoard gets of each rank."""

from dataclasses import replace
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from project.tracking.dashboard import Dashboard, of_all, of_rank
from project.tracking.diagnosis import Diagnosis
from project.tracking.windows import Window

WINDOW = Window(10, 640, 0.1, 1, 2, 3, 4, 0, 0, step_p50=10, step_p95=11, step_p99=12, step_max=13, late=0)


def read(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return events


def test_each_rank_is_a_run_with_the_tags_of_all(tmp_path: Path) -> None:
    dashboard = Dashboard(tmp_path)
    for step in (10, 20):
        dashboard.write(step, [WINDOW, replace(WINDOW, samples=320, step_max=50)], {"progress/percent": step})
    dashboard.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all", "rank_000", "rank_001"]
    of_run = {name: read(tmp_path / name) for name in ("all", "rank_000", "rank_001")}
    tags = {name: set(events.Tags()["scalars"]) for name, events in of_run.items()}
    assert tags["rank_000"] == tags["rank_001"]
    assert tags["rank_000"] < tags["all"]
    speed = [point.value for point in of_run["all"].Scalars("speed/samples_per_s")]
    assert speed == pytest.approx([9600, 9600])
    assert [point.step for point in of_run["rank_001"].Scalars("speed/step_ms_max")] == [10, 20]
    assert of_run["all"].Scalars("speed/step_ms_max")[0].value == 50
    assert of_run["all"].Scalars("progress/percent")[-1].value == 20


def test_the_parts_of_a_step_sum_to_it(tmp_path: Path) -> None:
    values = of_rank(replace(WINDOW, sync=1))
    parts = [value for tag, value in values.items() if tag.startswith("step_percent/")]
    assert sum(parts) == pytest.approx(100)
    assert values["step_ms/backward"] == 3


def test_what_is_not_known_is_not_written(tmp_path: Path) -> None:
    dashboard = Dashboard(tmp_path)
    dashboard.write(1, [WINDOW], {})
    dashboard.close()
    tags = read(tmp_path / "all").Tags()["scalars"]
    assert "step_ms/sync_overlapped" not in tags
    assert "machine/device_memory_GB" not in tags
    assert not (tmp_path / "rank_000").exists()  # one rank is all


def test_with_many_ranks_only_the_latest_have_curves(tmp_path: Path) -> None:
    dashboard = Dashboard(tmp_path, max_rank_series=2)
    dashboard.write(1, [replace(WINDOW, late=late) for late in (0, 9, 1, 7)], {})
    dashboard.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all", "rank_001", "rank_003"]


def test_layout_and_diagnosis_are_there(tmp_path: Path) -> None:
    dashboard = Dashboard(tmp_path)
    dashboard.write_diagnosis(5, Diagnosis("input", "all of it", 2.0, ("data.num_workers=2",)))
    dashboard.close()
    tags = read(tmp_path / "all").Tags()
    assert "diagnosis/text_summary" in tags["tensors"]
    assert "custom_scalars__config__" in tags["tensors"]


def test_samples_per_second_add_up_and_times_do_not() -> None:
    values = of_all([WINDOW] * 4)
    assert values["speed/samples_per_s"] == pytest.approx(4 * 6400)
    assert values["speed/samples_per_s_and_rank"] == pytest.approx(6400)
    assert values["speed/step_ms_p50"] == 10
