"""The files and the table of a benchmark."""

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from project.benchmarking import report, scaling
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


@pytest.mark.parametrize("rates", [[28487.0], [28000.0, 29000.0]])
def test_a_range_is_shown_of_two_repeats_or_more(capsys: pytest.CaptureFixture[str], rates: list[float]) -> None:
    rate = Spread.expected(rates)
    trained = {"kind": "weak", "strategy": "ddp", "devices": 1, "error": None, "samples_per_s_per_device": 1.0}
    trained |= {"samples_per_s": rate, "efficiency": 1.0, "step_ms": dict.fromkeys(scaling.PERCENTILES, 1.0)}
    ratio = Spread.of([rate / 20000 for rate in rates])
    tables = [scaling._table([trained]), report.of_comparisons([replace(FAST, times_as_fast=ratio)]).tables[0]]
    report.show("a benchmark", report.Results([trained, {"times_as_fast": ratio}], tables))
    printed = capsys.readouterr().out
    if len(rates) == 1:
        assert "28,487 " in printed
        assert " to " not in printed
        assert "95 % confidence" not in printed
        assert "the range of its values needs benchmark.repeats=2 or more" in printed
    else:
        assert re.search(r"28,500 \([\d,]+ to [\d,]+\)", printed)
        assert "(1.40 to 1.45)" in printed
        assert "95 % confidence" in printed
        assert "benchmark.repeats" not in printed
