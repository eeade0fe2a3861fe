"""Trainings in turns within one process, one of a pair without a callback."""

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from launch.conftest import compose_config
from project.benchmarking import in_turns
from project.benchmarking.measure import Contender, measure, whole_seconds
from project.benchmarking.setup import training_config
from project.benchmarking.task import Task

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("devices", [1, 2])
def test_turns_take_the_same_steps_with_and_without_the_callback(tmp_path: Path, devices: int) -> None:
    composed = compose_config(f"paths.run_dir={tmp_path}", "trainer.accelerator=cpu")
    plain: dict[str, Any] = OmegaConf.to_container(composed, resolve=True)  # type: ignore[assignment]
    config = training_config(plain, batch_size=8, steps=12)
    config["trainer"]["devices"] = devices
    arguments = ["-m", in_turns.__name__, "tracker", "2"]
    contender = Contender("turns", arguments, whole_seconds, Task(config, 12, "", devices=devices))
    measured = measure(contender, tmp_path / "turns", timeout_s=100)
    report = measured.report
    for side in ("with", "without"):
        assert [len(turn["ends_s"]) for turn in report[side]] == [12, 12]
        assert in_turns.seconds_per_step(side, 2)(measured) > 0
    began = {(side, pair): turn["ends_s"][0] for side in report for pair, turn in enumerate(report[side])}
    assert sorted(began, key=began.__getitem__) == [("without", 0), ("with", 0), ("with", 1), ("without", 1)]
    losses = {turn["loss"] for turns in report.values() for turn in turns}
    assert len(losses) == 1  # the same training each time
    runs = tmp_path / "turns" / "run"
    tracked = {path.relative_to(runs).parts[0] for path in runs.rglob("tensorboard/all/events*")}
    assert tracked == {"0_with", "1_with"}
