"""A run from the command to its folder."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from comparison import Run
from interpreters import is_alive
from project.launch.call import call
from project.models import ImageClassifier

pytestmark = pytest.mark.slow

QUIET = ("trainer.enable_progress_bar=false", "trainer.enable_model_summary=false")


def scalars(folder: Path, tag: str) -> list[float]:
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [event.value for event in events.Scalars(tag)]


@pytest.mark.parametrize("devices", [1, 4])
def test_default_experiment_learns_the_digits_on_any_number_of_ranks(run: Run, devices: int) -> None:
    folder, metrics = run(*QUIET, f"trainer.devices={devices}")
    _, on_one = run(*QUIET, "trainer.devices=1")
    assert metrics["test/accuracy"] >= 0.97
    assert abs(metrics["test/accuracy"] - on_one["test/accuracy"]) < 0.01
    files = {str(path.relative_to(folder)) for path in folder.rglob("*")}
    assert files >= {
        "config.yaml",
        "overrides.yaml",
        "environment.json",
        "metrics.json",
        "checkpoints/best.ckpt",
        "checkpoints/last.ckpt",
        *(f"ranks/rank_{rank}.log" for rank in range(devices)),
    }
    assert len(list((folder / "tensorboard").glob("events*"))) == 1


def test_train_loss_of_each_step_is_the_same_on_1_2_and_4_ranks(run: Run) -> None:
    steps = {}
    for devices in (1, 2, 4):
        options = ("optimizer=sgd", "scheduler=none", "trainer.max_steps=20", "trainer.log_every_n_steps=1")
        folder, _ = run(*QUIET, *options, f"trainer.devices={devices}")
        steps[devices] = scalars(folder, "train/loss")
    assert len(steps[1]) == 20
    assert steps[2] == pytest.approx(steps[1], abs=1e-5)
    assert steps[4] == pytest.approx(steps[1], abs=1e-5)


def test_curves_texts_and_figure_are_in_tensorboard(run: Run) -> None:
    folder, metrics = run(*QUIET, "trainer.devices=4")
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    tags = events.Tags()
    expected = {"train/loss", "train/lr", "train/grad_norm", "val/accuracy", "val/f1", "val/loss", "test/accuracy"}
    assert expected <= set(tags["scalars"])
    assert "hp_metric" not in tags["scalars"]
    assert {"config/text_summary", "environment/text_summary"} <= set(tags["tensors"])
    assert "test/confusion_matrix" in tags["images"]
    assert events.Scalars("test/accuracy")[-1].value == pytest.approx(metrics["test/accuracy"])
    assert len(events.Scalars("train/loss")) == 38  # every 10 of 380 steps, whatever the length of an epoch
    assert json.loads((folder / "metrics.json").read_text())["steps"] == 380  # which the starting process is told
    (text,) = (event.tensor_proto.string_val[0].decode() for event in events.Tensors("config/text_summary"))
    assert "lr: 0.003" in text
    assert "${" not in text  # every value is resolved


def test_last_checkpoint_is_the_last_state_and_best_is_the_best(run: Run) -> None:
    # mode=min on accuracy: the first epoch is the best, and training goes on past it.
    folder, _ = run(*QUIET, "mode=min", "trainer.max_epochs=3", "callbacks.last.min_gap_s=null")
    best, last = (torch.load(folder / "checkpoints" / f"{name}.ckpt", weights_only=True) for name in ("best", "last"))
    assert (best["global_step"], last["global_step"]) == (19, 57)
    accuracies = scalars(folder, "val/accuracy")
    assert json.loads((folder / "metrics.json").read_text())["objective"] == pytest.approx(min(accuracies))
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["best.ckpt", "last-1.ckpt", "last.ckpt"]


def test_checkpoint_is_plain_data_and_rebuilds_the_module(run: Run) -> None:
    folder, metrics = run(*QUIET, "trainer.devices=1")
    checkpoint = torch.load(folder / "checkpoints" / "best.ckpt", weights_only=True)
    assert checkpoint["config"]["optimizer"]["lr"] == 0.003
    module = ImageClassifier.load_from_checkpoint(folder / "checkpoints" / "best.ckpt")
    assert module.net.layers[1].in_features == 64
    assert metrics["test/accuracy"] > 0.9


def test_sanity_check_does_not_count_as_a_result(run: Run) -> None:
    folder, _ = run(*QUIET, "mode=min", "trainer.max_epochs=3")
    assert len(scalars(folder, "val/accuracy")) == 3


def test_zero_is_a_seed_and_a_seed_repeats_a_run(run: Run) -> None:
    options = (*QUIET, "trainer.max_epochs=1", "trainer.devices=2")
    zero, one = run(*options, "seed=0")[1], run(*options, "seed=1")[1]
    again = run(*options, "seed=0", "hparams=[]")[1]
    assert zero == again
    assert zero["val/loss"] != one["val/loss"]


def test_drawn_seed_is_recorded(run: Run) -> None:
    folder, _ = run(*QUIET, "debug=fast", "seed=null", "trainer.devices=2")
    assert isinstance(torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["config"]["seed"], int)


@pytest.mark.parametrize(
    "options",
    [
        ("logger=none", "callbacks=none", "scheduler=none"),
        ("logger=csv", "callbacks=early_stopping", "scheduler=plateau"),
        ("scheduler=warmup_cosine", "monitor=null"),
        ("model/net=residual_cnn",),
        ("data=synthetic",),
    ],
)
def test_groups_can_be_chosen_and_left_out(run: Run, options: tuple[str, ...]) -> None:
    _, metrics = run(*QUIET, "debug=fast", *options, "trainer.devices=2")
    assert 0 <= metrics["test/accuracy"] <= 1


def test_a_training_that_early_stopping_ended_says_so(run: Run) -> None:
    never_better = ("callbacks.early_stopping.patience=1", "callbacks.early_stopping.min_delta=10")
    folder, _ = run(*QUIET, "logger=none", "callbacks=early_stopping", *never_better)
    outcome = json.loads((folder / "metrics.json").read_text())
    # Also though the test has taken the callbacks back to the best checkpoint, of before.
    assert outcome["ended_early"] == "val/accuracy was not better in the last validation"
    assert outcome["epochs"] == 2


def test_two_batches_are_learnt_by_heart(run: Run) -> None:
    _, metrics = run(*QUIET, "debug=overfit", "trainer.devices=2")
    assert metrics["train/loss"] < 0.01


def test_profile_of_the_hooks_is_printed_and_logged(run_cli: Any, tmp_path: Path) -> None:
    result = run_cli("train", *QUIET, "debug=profile", "trainer.max_epochs=1", "paths.run_dir=run")
    assert (result.stdout + result.stderr).count("FIT Profiler Report") == 1
    assert "FIT Profiler Report" in (tmp_path / "run" / "ranks" / "rank_0.log").read_text()


def test_console_is_rank_zeros_and_each_rank_has_its_log(run_cli: Any, tmp_path: Path) -> None:
    write_module(tmp_path)
    progress = ("trainer.enable_progress_bar=true", "progress.interval_s=0.001")
    result = run_cli("train", *OWN, *progress, "trainer.devices=2", "+model.shout=true", "paths.run_dir=run")
    assert result.returncode == 0, result.stderr
    logs = [(tmp_path / "run" / "ranks" / f"rank_{rank}.log").read_text() for rank in (0, 1)]
    # No bar where there is no terminal, but lines of rank 0.
    told = [bool(re.search(r"^epoch 2/2, .* 100%", text, re.MULTILINE)) for text in (result.stdout, *logs)]
    assert told == [True, True, False]
    assert "\r" not in result.stdout + result.stderr
    assert "this is rank 0" in result.stdout
    assert "this is rank 1" not in result.stdout + result.stderr
    assert "this is rank 1" in (tmp_path / "run" / "ranks" / "rank_1.log").read_text()
    assert "this is rank 0" in (tmp_path / "run" / "ranks" / "rank_0.log").read_text()


def test_runs_of_the_same_second_get_folders_of_their_own(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "project.train", "debug=fast", *QUIET]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    runs = [
        subprocess.Popen(command, cwd=tmp_path, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        for _ in range(3)
    ]
    assert [process.wait(timeout=120) for process in runs] == [0, 0, 0]
    assert len(list(tmp_path.glob("outputs/debug_fast/*/metrics.json"))) == 3


MODULE = """
import os, time
import lightning as L, torch
from torch.utils.data import DataLoader, TensorDataset

class Data(L.LightningDataModule):
    def __init__(self, length=64):
        super().__init__()
        x = torch.randn(length, 4, generator=torch.Generator().manual_seed(0))
        self.set = TensorDataset(x, x.sum(1, keepdim=True))
    def train_dataloader(self): return DataLoader(self.set, batch_size=8, shuffle=True)
    def val_dataloader(self): return DataLoader(self.set, batch_size=8)
    def test_dataloader(self): return DataLoader(self.set, batch_size=8)

class Model(L.LightningModule):
    def __init__(self, shout=False, fail_on=None, sleep_s=0.0, sync=True):
        super().__init__()
        self.line = torch.nn.Linear(4, 1)
        self.shout, self.fail_on, self.sleep_s, self.sync = shout, fail_on, sleep_s, sync
    def loss(self, batch): return ((self.line(batch[0]) - batch[1]) ** 2).mean()
    def training_step(self, batch, index):
        if self.shout: print(f"this is rank {self.global_rank}", flush=True)
        if self.fail_on == self.global_rank: raise RuntimeError("a fault of one rank")
        time.sleep(self.sleep_s)
        return self.loss(batch)
    def validation_step(self, batch, index): self.log("val_loss", self.loss(batch), sync_dist=self.sync)
    def test_step(self, batch, index): self.log("test_loss", self.loss(batch), sync_dist=self.sync)
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), 0.1)
"""
OWN = (
    "model._target_=own.Model",
    "data._target_=own.Data",
    "monitor=val_loss",
    "mode=min",
    "trainer.max_epochs=2",
    *QUIET,
)


def write_module(folder: Path) -> None:
    (folder / "own.py").write_text(MODULE)


@pytest.mark.parametrize("devices", [1, 2])
def test_module_and_data_of_ones_own_run_unchanged(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: int
) -> None:
    write_module(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    _, metrics = run(*OWN, f"trainer.devices={devices}", "trainer.log_every_n_steps=2")
    assert metrics["test_loss"] < 0.1
    # The plain loader's batches are global: steps and losses are those of one rank.
    assert metrics["train/loss"] == pytest.approx(
        run(*OWN, "trainer.devices=1", "trainer.log_every_n_steps=2")[1]["train/loss"]
    )


def test_mean_over_ranks_with_unequal_shares_is_one_over_all_samples(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_module(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    options = (*OWN, "trainer.devices=1", "+data.length=50")
    folder, metrics = run(*options)
    for devices in (1, 3):
        checkpoint = f"ckpt_path={folder}/checkpoints/best.ckpt"
        overrides = (checkpoint, f"trainer.devices={devices}", "trainer.enable_progress_bar=false")
        assert call("evaluate", *overrides, f"paths.outputs={tmp_path}").metrics["test_loss"] == pytest.approx(
            metrics["test_loss"], rel=1e-5
        )


def records(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.glob("*.[yj]*")}


def test_what_was_typed_in_vain_does_not_stand_in_the_way_of_what_is_typed_next(run_cli: Any, tmp_path: Path) -> None:
    result = run_cli("train", *QUIET, "paths.run_dir=run", "monitor=val/nothing", "trainer.max_epochs=2")
    assert result.returncode == 1
    result = run_cli("train", *QUIET, "paths.run_dir=run", "trainer.max_epochs=2", "scheduler=none")
    assert result.returncode == 0, result.stderr
    before = records(tmp_path / "run")
    result = run_cli("train", "resume=run", "trainer.max_epochs=1")
    assert result.returncode == 1
    assert "error: the run has trained more epochs than trainer.max_epochs says" in result.stderr
    assert records(tmp_path / "run") == before
    result = run_cli("train", "resume=run", "trainer.max_epochs=3")
    assert result.returncode == 0, result.stderr
    assert "trainer.max_epochs=1" not in (tmp_path / "run" / "overrides.yaml").read_text()


def test_experiment_file_of_own_classes_is_given_what_they_take(run_cli: Any, tmp_path: Path) -> None:
    write_module(tmp_path)
    (tmp_path / "mine.yaml").write_text(
        "# @package _global_\ndata: {_target_: own.Data, length: 32}\nmodel: {_target_: own.Model}\nmonitor: val_loss\n"
    )
    result = run_cli("train", "experiment=mine.yaml", "mode=min", "trainer.max_epochs=1", *QUIET)
    assert result.returncode == 0, result.stderr
    assert "test_loss" in result.stdout


def test_metric_that_differs_between_ranks_is_refused_as_monitor(run_cli: Any, tmp_path: Path) -> None:
    write_module(tmp_path)
    result = run_cli("train", *OWN, "trainer.devices=2", "+model.sync=false")
    assert result.returncode == 1
    assert "error: monitor=val_loss differs between the ranks" in result.stderr


def test_fault_of_one_rank_ends_all_and_is_shown_once(run_cli: Any, tmp_path: Path) -> None:
    write_module(tmp_path)
    result = run_cli("train", *OWN, "trainer.devices=4", "+model.fail_on=1")
    assert result.returncode == 1
    assert result.stderr.count("RuntimeError: a fault of one rank") == 1
    assert result.stderr.count("Traceback") == 1
    assert "rank 1 failed first" in result.stderr


@pytest.mark.parametrize("how", ["group", "launcher"])
def test_interrupt_ends_all_ranks_within_five_seconds(tmp_path: Path, how: str) -> None:
    process, ranks = start_slow_run(tmp_path)
    begin = time.monotonic()
    if how == "group":
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGINT)
    assert process.wait(timeout=10) == 130
    wait_for_end(ranks)
    assert time.monotonic() - begin < 5


def test_killed_launcher_leaves_no_rank_behind(tmp_path: Path) -> None:
    process, ranks = start_slow_run(tmp_path)
    process.kill()
    process.wait(timeout=10)
    begin = time.monotonic()
    wait_for_end(ranks)
    assert time.monotonic() - begin < 5


def wait_for_end(processes: list[psutil.Process]) -> None:
    """Wait until all have ended; zombies have, though nobody may have asked for their exit codes."""
    while any(is_alive(process) for process in processes):
        time.sleep(0.05)


def start_slow_run(folder: Path) -> tuple["subprocess.Popen[bytes]", list[psutil.Process]]:
    """A run of two ranks in the middle of its training, and those ranks."""
    write_module(folder)
    options = [*OWN, "trainer.devices=2", "+model.sleep_s=0.2", "trainer.max_epochs=100", "paths.run_dir=run"]
    process = subprocess.Popen(
        [sys.executable, "-m", "project.train", *options, "+model.shout=true"],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    log = folder / "run" / "ranks" / "rank_1.log"
    end = time.monotonic() + 90
    while not (log.exists() and log.read_text().count("this is rank 1") > 3):
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.1)
    server_and_ranks = psutil.Process(process.pid).children(recursive=True)
    return process, [p for p in server_and_ranks if p.ppid() != process.pid]
