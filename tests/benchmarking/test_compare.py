"""Contenders in turns, with stand-ins that need no torch."""

import itertools
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from scipy import stats

from project.benchmarking.compare import Comparison, Spread, compare
from project.benchmarking.measure import Contender, Measured, MeasurementError, measure, whole_seconds


def contender(name: str, *values_s: float, code: str = "pass") -> Contender:
    """One that takes these seconds, by turns."""
    values = itertools.cycle(values_s or (1.0,))
    take: Callable[[Measured], float] = lambda _: next(values)  # noqa: E731
    return Contender(name, ["-c", code], take)


def test_ratio_is_taken_between_the_measurements_of_each_repeat(tmp_path: Path) -> None:
    # The machine is ten times slower in the second repeat, for both: only the ratio stays.
    groups = [[Comparison("row", "step", contender("ours", 1, 10, 2), contender("theirs", 2, 20, 3), at_least=0.9)]]
    (row,) = compare(groups, 3, tmp_path / "runs", timeout_s=30)
    assert row.times_as_fast is not None
    assert row.candidate_s is not None
    assert (row.times_as_fast.median, row.times_as_fast.low, row.times_as_fast.high) == (2, 1.5, 2)
    assert (row.candidate_s.median, row.candidate_s.low, row.candidate_s.high) == (2, 1, 10)
    assert row.error is None


def test_contenders_of_a_group_run_in_turns_and_a_shared_one_runs_once_a_repeat(tmp_path: Path) -> None:
    a, b, c, d = (contender(name) for name in "abcd")
    groups = [[Comparison("a by b", "step", a, b), Comparison("a by c", "step", a, c)], [Comparison("d", "step", d, d)]]
    lines: list[str] = []
    compare(groups, 2, tmp_path / "runs", 30, lines.append)
    assert lines == ["1/2 a", "1/2 b", "1/2 c", "1/2 d", "2/2 b", "2/2 c", "2/2 a", "2/2 d"]


def test_contenders_of_one_process_are_measured_together(tmp_path: Path) -> None:
    both = contender("with", 2)
    without = replace(contender("without", 3), process="with")
    lines: list[str] = []
    (row,) = compare([[Comparison("with by without", "step", both, without)]], 2, tmp_path / "runs", 30, lines.append)
    assert lines == ["1/2 with", "2/2 with"]
    assert row.times_as_fast == Spread(1.5, 1.5, 1.5)


def test_failure_is_a_row_with_its_error_and_the_rest_goes_on(tmp_path: Path) -> None:
    ours, broken = contender("ours"), contender("broken", code="raise ValueError('no such thing')")
    groups = [
        [Comparison("fails", "step", broken, contender("never run"))],
        [Comparison("works", "step", ours, contender("theirs")), Comparison("fails too", "step", ours, broken)],
    ]
    lines: list[str] = []
    fails, works, fails_too = compare(groups, 2, tmp_path / "runs", 30, lines.append)
    assert fails.error == fails_too.error == "broken: ValueError: no such thing"
    assert fails.times_as_fast is None
    assert works.error is None
    assert works.times_as_fast is not None
    assert lines.count("1/2 broken") == 1
    assert not any("2/2 broken" in line or "never run" in line for line in lines)


@pytest.mark.slow
def test_process_that_takes_too_long_is_ended_with_its_children(tmp_path: Path) -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    slow = Contender("slow", ["-c", code], whole_seconds)
    with pytest.raises(MeasurementError, match=r"no end after 1 s: see .*output.log"):
        measure(slow, tmp_path / "slow", timeout_s=1)
    assert not [child for child in psutil.Process().children(recursive=True) if "time.sleep(60)" in child.cmdline()]


def test_error_of_a_rank_is_told_rather_than_its_launchers(tmp_path: Path) -> None:
    code = "print('[rank1]: RuntimeError: out of cheese'); raise SystemError('the launcher: child failed')"
    with pytest.raises(MeasurementError, match=r"^RuntimeError: out of cheese$"):
        measure(contender("two ranks", code=code), tmp_path / "ranks", timeout_s=30)


@pytest.mark.parametrize("values", [[3.0, 5.0], [10.0, 11.0, 15.0], [4.0, 4.5, 5.5, 4.2, 4.4], [1.0, 2.0] * 5])
def test_the_mean_of_others_is_expected_where_students_t_says(values: list[float]) -> None:
    spread = Spread.expected(values)
    error = stats.sem(values)
    low, high = stats.t.interval(0.95, len(values) - 1, loc=statistics.fmean(values), scale=error)
    assert spread.median == statistics.median(values)
    assert spread.low == pytest.approx(max(0.0, low), rel=1e-3)
    assert spread.high == pytest.approx(high, rel=1e-3)


def test_nothing_can_be_said_of_the_spread_of_one_measurement() -> None:
    assert Spread.expected([7.0]) == Spread(7.0, 7.0, 7.0)
