"""What the table at the end says."""

from pathlib import Path

import pytest

from project.launch.run import Outcome, Run
from project.launch.summary import announce, summarize

CONFIG = {"name": "mlp", "monitor": "val/accuracy", "data": {"_target_": "project.data.DigitsDataModule"}}


def test_the_best_value_stands_beside_the_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = {"test/accuracy": 0.8, "val/accuracy": 0.9}
    outcome = Outcome(metrics, objective=0.95, checkpoint=str(tmp_path / "best.ckpt"), train_s=1.0)
    summarize("train", CONFIG, Run(tmp_path, [], {}, 0.0), outcome)
    rows = [line.strip("│ ").split("│") for line in capsys.readouterr().out.splitlines() if "│" in line]
    table = {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in rows}
    assert table["test/accuracy"] == ["0.8000", "of best.ckpt"]
    assert table["val/accuracy"] == ["0.9000", "of the last epoch"]
    assert table["best val/accuracy"][0] == "0.9500"
    assert table["best checkpoint"][0] == str(tmp_path / "best.ckpt")  # whole, to be copied
    assert table["training time"][0] == "1.0 s on 1 rank"


def test_metrics_of_a_step_or_of_one_rank_are_told_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = {"test_loss": 1.0, "train_loss": 1.0, "val_loss": 1.0, "val_f1": 1.0}
    spans, of_rank_0 = {"train_loss": "the last step"}, ["test_loss", "train_loss", "val_loss"]
    outcome = Outcome(metrics, checkpoint="best.ckpt", spans=spans, of_rank_0=of_rank_0)
    summarize("train", CONFIG, Run(tmp_path, [], {}, 0.0), outcome)
    rows = [
        [cell.strip() for cell in line.split("│")] for line in capsys.readouterr().out.splitlines() if "1.0" in line
    ]
    assert {row[1]: row[3] for row in rows} == {
        "test_loss": "of best.ckpt, rank 0's part",
        "train_loss": "of the last step, rank 0's part",
        "val_loss": "of the last epoch, rank 0's part",
        "val_f1": "of the last epoch",
    }


def test_what_ended_a_training_early_stands_beside_its_epochs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = Outcome({}, epochs=7, steps=133, ended_early="val/accuracy was not better in the last 5 validations")
    summarize("train", CONFIG, Run(tmp_path, [], {}, 0.0), outcome)
    row = next(line for line in capsys.readouterr().out.splitlines() if "epochs, steps" in line)
    assert "7, 133" in row
    assert "ended early: val/accuracy was not better in the last 5 validations" in row


def test_the_devices_of_one_process_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(tmp_path, [], {}, 0.0)
    announce("train", CONFIG, run, 1, 4)
    announce("train", CONFIG, run, 4, 4)
    summarize("train", CONFIG, run, Outcome({}, train_s=1.0, num_devices=4))
    one, four, *table = capsys.readouterr().out.splitlines()
    assert "on digits, 1 rank with 4 devices," in one
    assert "on digits, 4 ranks," in four
    assert any("1.0 s on 1 rank with 4 devices" in line for line in table)


@pytest.mark.parametrize(
    ("target", "data"), [("project.data.SyntheticImages", "synthetic"), ("plain.Data", "plain.Data")]
)
def test_the_first_line_names_the_data_by_their_choice_or_class(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str, data: str
) -> None:
    announce("train", {"name": "model", "seed": 3, "data": {"_target_": target}}, Run(tmp_path, [], {}, 0.0), 2, 2)
    assert capsys.readouterr().out == f"train model on {data}, 2 ranks, seed 3, in {tmp_path}\n"
