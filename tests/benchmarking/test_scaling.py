"""Which combinations a scaling benchmark measures, without measuring any."""

from pathlib import Path
from typing import Any

import pytest

from project.benchmarking import scaling
from project.benchmarking.measure import MeasurementError
from project.launch.run import Run


@pytest.mark.parametrize(
    ("devices", "kinds", "measured"),
    [
        (2, ["strong", "weak"], ["ddp on 2, strong"]),
        (2, ["weak"], ["ddp on 2, weak"]),
        ([2, 1, 2], ["strong", "weak"], ["ddp on 1, strong", "ddp on 2, strong", "ddp on 2, weak"]),
    ],
)
def test_a_number_of_devices_is_a_list_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: Any, kinds: list[str], measured: list[str]
) -> None:
    def fail(*_: Any) -> None:
        raise MeasurementError("not measured")

    monkeypatch.setattr(scaling, "measure", fail)
    settings: dict[str, Any] = {"calls": 1, "repeats": 1, "warmup_steps": 1, "steps": 2, "timeout_s": 1}
    results = scaling.measure_scaling(
        {"data": {"batch_size": 8}},
        Run(tmp_path, [], {}, started_at=0.0),
        lambda _: None,
        strategies=["ddp"],
        devices=devices,
        kinds=kinds,
        batch_sizes=[],
        **settings,
    )
    assert [error.partition(":")[0] for error in results.errors] == measured
