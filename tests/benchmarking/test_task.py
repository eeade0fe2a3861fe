"""The clock of measured steps."""

from pathlib import Path

import pytest

from project.benchmarking import task
from project.benchmarking.task import StepClock


def test_the_device_is_waited_for_where_the_warm_up_and_the_measured_steps_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited_before: list[int] = []
    clock = StepClock(str(tmp_path / "report.json"), steps=7, warmup_steps=3)
    monkeypatch.setattr(task, "_wait_for_gpu", lambda: waited_before.append(len(clock.ends_s)))
    assert [clock.tick(epoch=0) for _ in range(7)] == [False] * 6 + [True]
    assert waited_before == [2, 6]  # before the third and the seventh are noted
