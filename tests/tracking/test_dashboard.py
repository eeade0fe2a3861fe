"""What TensorBoard gets of each rank."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from project.tracking.dashboard import Dashboard, summary_page
from project.tracking.diagnosis import Diagnosis
from project.tracking.windows import Ranks, Window

WINDOW = Window(
    steps=10, samples=640, wall_s=0.1, data=1, transfer=2, forward=3, backward=4,
    step_p50=10, step_p95=11, step_p99=12, step_max=13, late=0, memory_bytes=2e9,
)  # fmt: skip
TWO = Ranks.of([WINDOW, replace(WINDOW, samples=320, step_max=50, late=3)])
VERDICT = Diagnosis("straggler", "rank 1 it is", 2.0, ("data.num_workers=2",), rank=1, phase="data", factor=2.5)


def read(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return events


def test_each_rank_is_a_run_with_the_tags_of_all(tmp_path: Path) -> None:
    dashboard = Dashboard(tmp_path, num_replicas=2)
    for step in (10, 20):
        dashboard.write(step, TWO, {"progress/percent": step})
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


def test_bands_and_histograms_over_the_ranks_are_in_all(tmp_path: Path) -> None:
    dashboard = Dashboard(tmp_path)
    dashboard.write(1, Ranks.of([replace(WINDOW, data=data) for data in (1, 2, 7)]), {})
    dashboard.close()
    events = read(tmp_path / "all")
    band = [events.Scalars(f"ranks/data_{end}")[0].value for end in ("min", "median", "max")]
    assert band == [1, 2, 7]
    histogram = events.Histograms("step_ms/data_of_ranks")[0].histogram_value
    assert (histogram.num, histogram.min, histogram.max, histogram.sum) == (3, 1, 7, 10)
    assert sum(histogram.bucket) == 3


def test_what_is_not_known_is_not_written(tmp_path: Path) -> None:
    dashboard = Dashboard(tmp_path)
    dashboard.write(1, Ranks.of([WINDOW]), {"speed/mfu_percent": math.nan})
    dashboard.close()
    tags = read(tmp_path / "all").Tags()["scalars"]
    assert "speed/step_ms_p50" in tags
    assert not {"step_ms/sync_overlapped", "machine/gpu_percent", "speed/tokens_per_s", "speed/mfu_percent"} & set(tags)
    assert not (tmp_path / "rank_000").exists()  # one rank is all


def test_with_many_ranks_the_latest_and_stragglers_have_curves(tmp_path: Path) -> None:
    dashboard = Dashboard(tmp_path, max_rank_series=2)
    dashboard.write(1, Ranks.of([replace(WINDOW, late=late) for late in (0, 9, 1, 7)]), {})
    dashboard.write(2, Ranks.of([replace(WINDOW, late=late) for late in (9, 0, 1, 7)]), {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all", "rank_001", "rank_003"]
    dashboard.write(3, Ranks.of([replace(WINDOW, late=late) for late in (9, 0, 1, 7)]), {}, straggler=0)
    dashboard.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all", "rank_000", "rank_001", "rank_003"]


def test_the_replicas_of_dp_are_runs(tmp_path: Path) -> None:
    dashboard = Dashboard(tmp_path)
    dashboard.write(1, Ranks.of([WINDOW]), {}, replicas_ms=[3.5, 4.5])
    dashboard.close()
    assert read(tmp_path / "replica_001").Scalars("step_ms/forward")[0].value == 4.5


def test_layout_diagnosis_and_figures_are_there(tmp_path: Path) -> None:
    dashboard = Dashboard(tmp_path)
    dashboard.write(5, TWO, {})
    dashboard.write_page("diagnosis", 5, VERDICT, TWO, ["node1", "node2"])
    dashboard.write_pictures(5, TWO)
    dashboard.close()
    events = read(tmp_path / "all")
    tags = events.Tags()
    assert {"diagnosis/text_summary", "custom_scalars__config__"} <= set(tags["tensors"])
    assert tags["images"] == ["ranks/parts", "ranks/busy"]
    assert events.Images("ranks/busy")[0].encoded_image_string.startswith(b"\x89PNG")


def test_the_page_names_the_stragglers_host_and_the_parts_of_a_step() -> None:
    page = summary_page(VERDICT, TWO, ["node1", "node2"])
    assert "    bound by straggler: rank 1 it is" in page
    assert "rank 1 runs on node2" in page
    assert "| forward | 3.00 | 3.00 | 3.00 |" in page
