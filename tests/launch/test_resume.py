"""A run that goes on: its config, and its curves without a second line beside them."""

import csv
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.loggers import CSVLogger
from omegaconf import OmegaConf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from project.errors import UserError
from project.launch.resume import Point, compose_resumed, continue_curves, linked
from project.tracking.tensorboard import RunLogger


def write(folder: Path, steps: range, value: float) -> None:
    writer = SummaryWriter(str(folder))
    for step in steps:
        writer.add_scalar("step_ms", value, step)
    writer.close()


def test_points_after_the_checkpoint_are_left_out_of_tensorboard(tmp_path: Path) -> None:
    folder = tmp_path / "tensorboard"
    before = RunLogger(str(tmp_path))
    for step in range(10):
        before.log_metrics({"train/loss": 0.0}, step)
    before.experiment.close()
    write(folder / "all", range(1, 11), 0.0)
    time.sleep(1.1)  # event files are read in the order of their names, which start with the second they are from

    after = RunLogger(str(tmp_path))
    continue_curves([after], Point("last.ckpt", 6), rank=0)  # six steps are done: 0 to 5
    for step in range(6, 12):
        after.log_metrics({"train/loss": 1.0}, step)
    after.experiment.close()
    write(folder / "all", range(7, 13), 1.0)

    for run, tag, first in ((folder, "train/loss", 0), (folder / "all", "step_ms", 1)):
        events = EventAccumulator(str(run))
        events.Reload()
        points = [(event.step - first, event.value) for event in events.Scalars(tag)]
        assert points == [(step, float(step >= 6)) for step in range(12)], tag


def test_rows_after_the_checkpoint_are_left_out_of_the_csv_file(tmp_path: Path) -> None:
    for goes_on, steps in ((False, range(10)), (True, range(6, 12))):
        logger = CSVLogger(tmp_path, name="csv", version="")
        if goes_on:
            continue_curves([logger], Point("last.ckpt", 6), rank=0)
        for step in steps:
            logger.log_metrics({"loss": float(goes_on)}, step)
        logger.save()
    with (tmp_path / "csv" / "metrics.csv").open(newline="") as file:
        rows = [(int(row["step"]), float(row["loss"])) for row in csv.DictReader(file)]
    assert rows == [(step, float(step >= 6)) for step in range(12)]


@pytest.fixture
def stored(compose: Callable[..., Any]) -> dict[str, Any]:
    config: dict[str, Any] = OmegaConf.to_container(compose("optimizer.lr=0.5"), resolve=True)  # type: ignore[assignment]
    return config


def test_values_that_others_follow_are_followed_again(stored: dict[str, Any]) -> None:
    stored["mode"] = "other than its callbacks'"
    config = OmegaConf.create(linked(stored, ["optimizer.lr=0.5"], "train"))
    assert OmegaConf.to_container(config, resolve=True) == stored
    config.seed, config.monitor, config.scheduler = 7, "val/loss", None
    assert (config.data.seed, config.callbacks.best.monitor, config.model.scheduler) == (7, "val/loss", None)
    assert config.callbacks.best.mode == "max"  # the values did not agree


def test_config_that_cant_be_composed_any_more_stays_as_it_is(stored: dict[str, Any]) -> None:
    assert linked(stored, ["no.such.key=1"], "train") == stored


@pytest.mark.parametrize("typed", ["optimizer.lr=0.1", "optimizer=sgd", "scheduler=plateau", "scheduler.max_lr=1"])
def test_what_the_checkpoint_decides_is_refused(tmp_path: Path, stored: dict[str, Any], typed: str) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(stored))
    with pytest.raises(UserError, match=rf"{typed} can't be: a run that goes on keeps its optimizer"):
        compose_resumed("train", ["train", f"resume={tmp_path}", typed])
    compose_resumed("train", ["train", f"resume={tmp_path}", "scheduler=none"])


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("outputs/kil", r"outputs/kil does not exist: did you mean outputs/kill\?"),
        ("output/kill", r"output/kill does not exist: did you mean outputs/kill\?"),
        ("outputs/digits_mlp/2026-12", r"did you mean outputs/digits_mlp/2026-12-03_07-42-11\?"),
        ("outputs/nothing", "outputs/nothing does not exist: type resume=<run folder>"),
        ("/nowhere/at/all", "/nowhere/at/all does not exist: type resume=<run folder>"),
    ],
)
def test_folder_that_does_not_exist_is_told_with_the_nearest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("kill", "digits_mlp/2026-12-03_07-42-11"):
        (tmp_path / "outputs" / name).mkdir(parents=True)
    with pytest.raises(UserError, match=words):
        compose_resumed("train", ["train", f"resume={typed}"])
