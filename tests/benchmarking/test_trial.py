"""A trial's report, and what is read from it."""

import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from omegaconf import OmegaConf

from project.benchmarking import trial_report
from project.benchmarking.measure import Measured
from project.benchmarking.scaling_figure import draw
from project.benchmarking.trial import Settings, contender, samples_per_s, shorten
from project.benchmarking.trial_report import TrialReport, with_size
from small_classifier import Classifier, loader, quiet_trainer


def test_rate_is_of_all_samples_after_the_warm_up() -> None:
    report = {"ends_s": [10, 20, 21, 22, 24], "samples": [8, 8, 8, 8, 4]}
    measured = Measured(0.0, 30.0, report)
    assert samples_per_s(measured, Settings(warmup_batches=2, batches=3)) == pytest.approx(20 / 4)
    assert samples_per_s(measured, Settings(warmup_batches=9, batches=3)) == pytest.approx(4 / 2)


def test_overrides_with_braces_reach_the_process_as_they_are() -> None:
    own = contender("own", ["+model.net={width: 3}"], Settings(1, 2))
    filled = [text.format(report="r", folder="f") for text in own.arguments]
    assert filled[-1] == "+model.net={width: 3}"
    assert filled[2:4] == ["r", "f"]


def test_a_shortened_training_has_so_many_batches_and_waits_for_no_metric() -> None:
    config = OmegaConf.create(
        {
            "trainer": {"accumulate_grad_batches": 4, "max_epochs": 9},
            "scheduler": {"_target_": "Plateau", "monitor": "val/loss"},
            "monitor": "val/loss",
            "test": True,
            "callbacks": {
                "tracker": {"_target_": "Tracker"},
                "best": {"_target_": "Checkpoint", "dirpath": "x"},
                "stop": {"_target_": "EarlyStopping", "monitor": "val/loss"},
                "none": None,
            },
        }
    )
    shorten(config, Settings(warmup_batches=2, batches=7), "report.json")
    assert (config.trainer.max_steps, config.trainer.max_epochs) == (3, -1)
    assert config.scheduler is None
    assert config.monitor is None
    assert config.test is False
    assert list(config.callbacks) == ["tracker", "trial_report"]


class Pair(NamedTuple):
    image: torch.Tensor
    label: torch.Tensor


@pytest.mark.parametrize("size", [1, 3, 7])
def test_a_batch_of_any_size_is_made_of_one_that_is_there(size: int) -> None:
    image = torch.arange(6).reshape(3, 2)
    batch: dict[str, Any] = {"image": image, "names": ["a", "b", "c"], "pair": Pair(image, image[:, 0]), "scale": 2.0}
    made = with_size(batch, size)
    assert made["image"].tolist() == [[2 * (i % 3), 2 * (i % 3) + 1] for i in range(size)]
    assert made["names"] == ["abc"[i % 3] for i in range(size)]
    assert isinstance(made["pair"], Pair)
    assert len(made["pair"].label) == size
    assert made["scale"] == 2.0


def test_figure_of_nothing_is_drawn_too() -> None:
    assert len(draw([], []).axes) == 2


def test_what_others_do_at_the_end_of_training_is_no_part_of_the_last_step(tmp_path: Path) -> None:
    class Slow(Callback):
        def on_train_end(self, *_: Any) -> None:
            time.sleep(0.5)

    report = tmp_path / "report.json"
    trainer = quiet_trainer(1, "auto", callbacks=[Slow(), TrialReport(str(report), [], 1)], max_steps=3)
    trainer.fit(Classifier(), loader([4, 4, 4]))
    ends_s = json.loads(report.read_text())["ends_s"]
    assert len(ends_s) == 3
    assert time.monotonic() - ends_s[-1] > 0.5


def test_the_device_is_waited_for_where_the_warm_up_and_the_trial_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = TrialReport(str(tmp_path / "report.json"), [], 1, warmup_batches=2)
    waited_before: list[int] = []
    monkeypatch.setattr(trial_report, "_wait_for", lambda device: waited_before.append(len(report.ends_s)))
    quiet_trainer(1, "auto", callbacks=[report], max_steps=4).fit(Classifier(), loader([4, 4, 4, 4]))
    assert waited_before == [1, 3]
