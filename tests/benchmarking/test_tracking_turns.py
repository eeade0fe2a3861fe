"""The tracker on and off by turns, in real trainings."""

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from composing import compose_config
from project.benchmarking.measure import Contender, measure, whole_seconds
from project.benchmarking.setup import training_config
from project.benchmarking.task import Task
from project.benchmarking.tracking_turns import is_tracked, seconds_per_step

pytestmark = pytest.mark.slow
STEPS = 100


@pytest.mark.parametrize("devices", [1, 2])
def test_training_is_the_same_and_half_of_its_steps_are_tracked(tmp_path: Path, devices: int) -> None:
    composed = compose_config(
        f"paths.run_dir={tmp_path}", "trainer.accelerator=cpu", "callbacks.tracker.interval_s=0.001"
    )
    plain: dict[str, Any] = OmegaConf.to_container(composed, resolve=True)  # type: ignore[assignment]
    config = training_config(plain, batch_size=8, steps=STEPS)
    config["trainer"]["devices"] = devices
    losses, tracked = [], []
    for what in ("train", "tracking"):
        task = Task(config, STEPS, "", devices=devices, measure=what)
        contender = Contender(what, ["-m", "project.benchmarking.template"], whole_seconds, task)
        measured = measure(contender, tmp_path / what, timeout_s=100)
        assert len(measured.report["ends_s"]) == STEPS
        losses.append(measured.report["loss"])
        (folder,) = (tmp_path / what).glob("run/tensorboard/all")
        events = EventAccumulator(str(folder)).Reload()
        tracked.append([event.step for event in events.Scalars("step_ms/forward")])
    assert losses[0] == losses[1]
    assert all(seconds_per_step(on, 10)(measured) > 0 for on in (True, False))
    # A window of ten steps ends where a step begins, and takes those of one turn and a half or so.
    assert len(tracked[1]) < len(tracked[0])
    assert all(is_tracked(step) for step in tracked[1][:-1])
