"""The files and the table of a benchmark."""

import csv
import json
from pathlib import Path

import pytest

from project.benchmarking import report
from project.benchmarking.compare import Row, Spread

FAST = Row("fast", "step", "ours", "theirs", Spread(0.1, 0.1, 0.2), Spread(0.2, 0.1, 0.3), Spread(2.0, 1.5, 2.5), 0.5)
SLOW = Row("slow", "epoch", "ours", "others", Spread(4.0, 3, 5), Spread(2.0, 2, 3), Spread(0.5, 0.4, 0.6), 0.9)
FAILED = Row("failed", "sample", "ours", "theirs", error='ours: ValueError: no, "never"')


def test_json_and_csv_hold_the_same_rows(tmp_path: Path) -> None:
    report.write(tmp_path, report.of_comparisons([FAILED, FAST, SLOW]), {"load": {"before": [0.1, 0.2, 0.3]}})
    content = json.loads((tmp_path / "benchmark.json").read_text())
    with (tmp_path / "benchmark.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert content["load"]["before"] == [0.1, 0.2, 0.3]
    assert [row["what"] for row in content["rows"]] == [line["what"] for line in lines] == ["failed", "fast", "slow"]
    assert content["rows"][0]["error"] == lines[0]["error"] == FAILED.error
    assert content["rows"][0]["times_as_fast"] is None
    assert lines[0]["times_as_fast_median"] == ""
    for row, line in zip(content["rows"][1:], lines[1:], strict=True):
        for part in ("median", "low", "high"):
            assert row["times_as_fast"][part] == float(line[f"times_as_fast_{part}"])


def test_table_shows_rates_times_spread_and_failures(capsys: pytest.CaptureFixture[str]) -> None:
    report.show("a benchmark", report.of_comparisons([FAST, SLOW, FAILED]))
    printed = capsys.readouterr().out
    assert "10 steps/s" in printed
    assert "4 s/epoch" in printed
    assert "2.00 (1.50 to 2.50)" in printed
    assert "failed" in printed
