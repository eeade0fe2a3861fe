"""From the times of steps to what is compared."""

from pathlib import Path

import pytest

from project.benchmarking.measure import (
    Contender,
    Measured,
    measure,
    seconds_per_epoch,
    seconds_per_step,
    seconds_to_first_step,
    step_times_s,
    whole_seconds,
)
from project.benchmarking.task import Task

# Three epochs of three steps, one second each; two seconds pass between epochs.
REPORT = {"ends_s": [11, 12, 13, 16, 17, 18, 21, 22, 23], "epochs": [0, 0, 0, 1, 1, 1, 2, 2, 2]}
MEASURED = Measured(started_s=4.0, wall_s=30.0, report=REPORT)


@pytest.mark.parametrize(("warmup_steps", "num_times"), [(0, 6), (1, 6), (2, 5), (4, 4), (8, 1)])
def test_step_times_leave_out_warm_up_and_the_first_step_of_each_epoch(warmup_steps: int, num_times: int) -> None:
    assert step_times_s(REPORT, warmup_steps) == [1] * num_times


def test_seconds_are_per_step_sample_epoch_and_start() -> None:
    assert seconds_per_step(warmup_steps=1)(MEASURED) == 1
    assert seconds_per_step(warmup_steps=1, per_step=4)(MEASURED) == 0.25
    assert seconds_per_epoch(warmup_epochs=1)(MEASURED) == 5
    assert seconds_to_first_step(MEASURED) == 7
    assert whole_seconds(MEASURED) == 30


def test_measured_process_gets_its_own_folder_for_all_that_its_config_writes(tmp_path: Path) -> None:
    of_benchmark = str(tmp_path / "benchmark")
    config = {"paths": {"run_dir": of_benchmark}, "callbacks": {"best": {"dirpath": f"{of_benchmark}/checkpoints"}}}
    code = "import json, sys; t = json.load(open(sys.argv[1])); open(t['report'], 'w').write(json.dumps(t['config']))"
    contender = Contender("its own", ["-c", code], whole_seconds, Task(config, 1, ""))
    measured = measure(contender, tmp_path / "0", timeout_s=30)
    own = str(tmp_path / "0" / "run")
    assert measured.report == {"paths": {"run_dir": own}, "callbacks": {"best": {"dirpath": f"{own}/checkpoints"}}}


def test_threads_and_waiting_are_the_same_for_all_unless_the_user_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import json, os; open(r'{report}', 'w').write(json.dumps(dict(os.environ)))"
    contender = Contender("threads", ["-c", code], whole_seconds, threads=3)
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GOMP_SPINCOUNT", "300000")  # the command's decision
    ours = measure(contender, tmp_path / "ours", timeout_s=30).report
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    theirs = measure(contender, tmp_path / "theirs", timeout_s=30).report
    assert [given["OMP_NUM_THREADS"] for given in (ours, theirs)] == ["3", "7"]
    assert all(given["GOMP_SPINCOUNT"] == "300000" and "OMP_WAIT_POLICY" not in given for given in (ours, theirs))
