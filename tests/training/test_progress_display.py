"""What is shown of a training under way, on a terminal and elsewhere."""

import io
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback, EarlyStopping
from torch import Tensor

from project.launch import heartbeat
from project.launch.heartbeat import Beat, Heartbeats, Sign
from project.training.progress_display import ProgressDisplay, display_of, duration, farthest_behind, shows_bar
from small_classifier import Classifier, loader, mlp

PLAIN: dict[str, Any] = {"progress": {"_target_": "project.training.progress_display.ProgressDisplay"}, "trainer": {}}


def train(display: ProgressDisplay, folder: Path, *callbacks: Callback, **arguments: Any) -> L.Trainer:
    trainer = L.Trainer(
        accelerator="cpu",
        callbacks=[*callbacks, display],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **arguments,
    )
    trainer.fit(Classifier(mlp()).double(), loader([4] * 8), loader([4] * 2))
    return trainer


def test_elsewhere_plain_lines_tell_progress_and_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(ProgressDisplay(interval_s=1e-9), tmp_path, max_epochs=2)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch ")]
    assert lines[0].startswith("epoch 1/2, step 1, ")
    assert " left" in lines[1]
    assert lines[-1].startswith("epoch 2/2, ")
    assert ", 100%" in lines[-1]
    assert "samples/s" in lines[-1]


def test_between_two_intervals_only_the_end_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(ProgressDisplay(interval_s=1000), tmp_path, max_epochs=-1, max_steps=5)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch ")]
    assert "step 5/5" in line


@pytest.mark.parametrize("shown_on", ["a file", "a terminal"])
@pytest.mark.parametrize("early", [True, False])
def test_the_last_line_says_of_the_end_what_the_table_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, early: bool, shown_on: str
) -> None:
    terminal = Terminal()
    if shown_on == "a terminal":
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setenv("COLUMNS", "300")
    stop = EarlyStopping("val/loss", patience=1, min_delta=1e9) if early else StopSilently()
    trainer = train(ProgressDisplay(interval_s=1000), tmp_path, stop, max_epochs=9)
    line = next(
        line for line in (terminal.getvalue() or capsys.readouterr().out).splitlines()[::-1] if "samples/s" in line
    )
    assert f"epoch {trainer.current_epoch}/9, step {trainer.global_step}, " in line
    assert trainer.current_epoch == 2
    assert " left" not in line
    assert ("ended early (val/loss was not better in the last validation)" in line) is early
    assert ("22%" in line) is not early


class StopSilently(Callback):
    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.current_epoch == 1


def test_what_a_model_logs_in_validation_is_told_without_prog_bar(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Plain(Classifier):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            for number in range(6):
                self.log(f"val_{number}", float(number))

    trainer = L.Trainer(
        accelerator="cpu", callbacks=[ProgressDisplay(interval_s=1000)], logger=False, enable_checkpointing=False,
        enable_model_summary=False, default_root_dir=tmp_path, max_epochs=1,
    )  # fmt: skip
    trainer.fit(Plain(mlp()).double(), loader([4] * 2), loader([4]))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch ")]
    assert "val_0 0.0000, val_1 1.0000, val_2 2, val_3 3" in line
    assert "val_4" not in line


def test_what_validation_logged_is_read_once_however_often_it_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[float] = []

    def as_number(value: Any) -> float:
        if isinstance(value, Tensor):
            read.append(float(value))
        return float(value)

    class Counting(Classifier):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_epoch", float(self.current_epoch))

    monkeypatch.setattr("project.training.progress_display.as_number", as_number)
    trainer = L.Trainer(
        accelerator="cpu", callbacks=[ProgressDisplay(interval_s=1e-9)], logger=False, enable_checkpointing=False,
        enable_model_summary=False, default_root_dir=tmp_path, max_epochs=3, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(Counting(mlp()).double(), loader([4] * 4), loader([4]))
    lines = [line for line in capsys.readouterr().out.splitlines() if "val_epoch" in line]
    assert [line.split()[-1] for line in lines] == ["0.0000"] * 4 + ["1.0000"] * 4 + ["2"]
    assert read == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("wanted", "stream", "shows"), [(True, "Terminal", True), (False, "Terminal", False), (True, "StringIO", False)]
)
def test_lightnings_bar_is_for_terminals(
    monkeypatch: pytest.MonkeyPatch, wanted: bool, stream: str, shows: bool
) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal() if stream == "Terminal" else io.StringIO())
    assert shows_bar({"trainer": {"enable_progress_bar": wanted}}) == shows


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_row_for_each_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beats = Heartbeats(tmp_path / "beats", 2)
    own, other = Beat(), Beat()
    own.start(beats.path, 0)
    other.start(beats.path, 1)
    own(40, "computes")
    other(37, "waits for data")
    monkeypatch.setattr("project.training.progress_display.BEAT", own)
    monkeypatch.setattr("project.training.progress_display.REDRAW_EVERY_S", 0)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    train(ProgressDisplay(), tmp_path, max_epochs=1)
    shown = terminal.getvalue()
    assert "rank 1  step 37  waits for data  3 behind" in shown
    assert "100%" in shown
    assert shown.endswith("\x1b[2K") or "\x1b[?25h" in shown  # the cursor comes back


def test_ranks_that_nobody_watches_have_no_rows() -> None:
    assert heartbeat.Beat().signs() == []


def test_rows_are_of_those_that_are_farthest_behind() -> None:
    signs = [Sign(rank, step, "computes", age_s) for rank, step, age_s in ((0, 9, 0), (1, 7, 0), (2, 9, 5), (3, 8, 0))]
    assert [sign.rank for sign in farthest_behind(signs, 3)] == [1, 3, 2]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")]
)
def test_durations_are_told_as_people_do(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_display_steps_back_for_a_bar_of_the_users_and_for_none() -> None:
    assert len(display_of(PLAIN, [])) == 1
    assert display_of(PLAIN, [ProgressDisplay()]) == []
    assert display_of(PLAIN | {"progress": None}, []) == []
    assert display_of(PLAIN | {"trainer": {"enable_progress_bar": False}}, []) == []
    assert display_of({"trainer": {}}, []) == []  # a run from before there was one


def test_intervals_that_cant_be_are_refused() -> None:
    with pytest.raises(ValueError, match="type progress.interval_s=10"):
        ProgressDisplay(interval_s=0)
