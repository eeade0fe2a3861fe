"""What the table at the end says."""

from pathlib import Path

import pytest

from project.launch.run import Outcome, Run
from project.launch.summary import summarize

CONFIG = {"name": "digits", "monitor": "val/accuracy"}


def test_the_best_value_stands_beside_the_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = Outcome({"val/accuracy": 0.9}, objective=0.95, checkpoint=str(tmp_path / "best.ckpt"), train_s=1.0)
    summarize("train", CONFIG, Run(tmp_path, [], {}, 0.0), outcome)
    rows = [line.strip("│ ").split("│") for line in capsys.readouterr().out.splitlines() if "│" in line]
    table = {cells[0].strip(): cells[1].strip() for cells in rows}
    assert table["val/accuracy"] == "0.9000"
    assert table["best val/accuracy"] == "0.9500"
    assert table["training time"] == "1.0 s on 1 rank"
