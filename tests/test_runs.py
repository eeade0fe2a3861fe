"""The ledger over run folders."""

import csv
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from project.errors import UserError
from project.runs import main
from project.sweep import ledger
from project.sweep.tensorboard import link
from sweep.folders import make_sweep, write_run


@pytest.fixture
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two single runs, and a sweep of two jobs."""
    monkeypatch.chdir(tmp_path)
    outputs = tmp_path / "outputs"
    write_run(
        outputs / "mlp" / "monday",
        metrics={"val/loss": 0.4, "test/f1": 0.9},
        objective=0.3,
        overrides=["optimizer.lr=0.1"],
        config={"optimizer": {"lr": 0.1}, "data": {"batch_size": 64}},
    )
    write_run(outputs / "mlp" / "tuesday", state="failed", error="RuntimeError: out of memory")
    sweep = make_sweep(outputs / "mlp" / "sweep_1", {"seed": "1"}, {"seed": "2"})
    for job, loss in zip(sweep.jobs, (0.2, 0.1), strict=True):
        write_run(job.folder, metrics={"val/loss": loss, "test/f1": loss}, objective=loss, overrides=[f"seed={loss}"])
        (job.folder / "tensorboard").mkdir()
    return outputs


def rows(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, str]]:
    assert main([*arguments, "--format", "csv"]) == 0
    return list(csv.DictReader(io.StringIO(capsys.readouterr().out)))


@pytest.mark.usefixtures("outputs")
def test_list_has_a_row_a_run_with_what_came_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    found = {row["run"]: row for row in rows(capsys, "list")}
    assert found.keys() == {"mlp/monday", "mlp/tuesday", "mlp/sweep_1/0_seed=1", "mlp/sweep_1/1_seed=2"}
    assert found["mlp/monday"] | {"git": ""} == {
        "run": "mlp/monday", "state": "finished", "metric": "val/loss", "value": "0.3", "seconds": "10.0", "ranks": "2",
        "git": "", "overrides": "optimizer.lr=0.1",
    }  # fmt: skip
    assert found["mlp/tuesday"]["state"] == "failed: RuntimeError: out of memory"


@pytest.mark.usefixtures("outputs")
def test_best_sorts_finished_runs_by_what_they_monitored_or_by_another_metric(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert [row["value"] for row in rows(capsys, "best")] == ["0.1", "0.2", "0.3"]
    assert [row["value"] for row in rows(capsys, "best", "-n", "1")] == ["0.1"]
    assert [row["value"] for row in rows(capsys, "best", "--metric", "test/f1", "--mode", "max")] == [
        "0.9",
        "0.2",
        "0.1",
    ]


@pytest.mark.usefixtures("outputs")
@pytest.mark.parametrize("metric", ["test/mae", "odd"])
def test_best_is_the_least_error_and_a_metric_that_says_nothing_is_asked_for(
    outputs: Path, capsys: pytest.CaptureFixture[str], metric: str
) -> None:
    for name, value in (("worse", 0.6), ("better", 0.1)):
        write_run(outputs / "own" / name, metrics={metric: value})
    if metric == "odd":
        assert main(["best", "--metric", metric]) == 1
        assert "whether more or less of odd is better is not known: type --mode max" in capsys.readouterr().err
    else:
        assert [row["value"] for row in rows(capsys, "best", "--metric", metric)] == ["0.1", "0.6"]


@pytest.mark.usefixtures("outputs")
def test_names_of_what_differs_are_whole_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    monkeypatch.setenv("COLUMNS", "40")
    key = "callbacks.early_stopping.patience"
    table = ledger.rendered(["", "one", "two", "three", "four"], [[key, 1, 2, 3, 4]], "table")
    assert key in table
    assert all(f" {number} " in table for number in (1, 2, 3, 4))


def many_runs(outputs: Path) -> list[str]:
    """Names of 22 runs in two sweeps, which differ in a key that is long."""
    names = [f"sweep_2026-12-03_07-4{sweep}-11/{n}_lr={n / 100}" for sweep in (2, 5) for n in range(11)]
    for number, name in enumerate(names):
        patience = {"callbacks": {"early_stopping": {"patience": 1000 + number}}}
        write_run(outputs / "tab_net" / name, config=patience, metrics={"val/loss": number})
    return names


def test_comparison_in_a_pipe_is_as_wide_as_it_needs(
    outputs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    names = many_runs(outputs)
    assert main(["compare", "tab_net"]) == 0
    common, *table = capsys.readouterr().out.splitlines()
    assert common == "Runs in outputs/tab_net:"
    assert sorted(table[1].replace("┃", " ").split()) == sorted(names)
    (line,) = [line for line in table if "callbacks.early_stopping.patience" in line]
    assert all(f" {1000 + number} " in line for number in range(22))


@pytest.mark.parametrize("columns", [80, 120])
def test_comparison_on_a_terminal_is_printed_in_blocks_that_fit(
    outputs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    monkeypatch.setenv("COLUMNS", str(columns))
    many_runs(outputs)
    assert main(["compare", "tab_net"]) == 0
    lines = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= columns
    blocks = [line for line in lines if "callbacks.early_stopping.patience" in line]
    assert len(blocks) == {80: 22, 120: 11}[columns]
    assert all(any(f" {1000 + number} " in line for line in blocks) for number in range(22))
    assert sum("sweep_2026-12-03_07-42-11/" in line for line in lines) >= len(blocks) // 2


@pytest.mark.usefixtures("outputs")
@pytest.mark.parametrize("columns", ["", "60"])
def test_overrides_stay_whole_and_a_failed_run_says_little(
    outputs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    if columns:
        monkeypatch.setattr("rich.console.Console.is_terminal", True)
        monkeypatch.setenv("COLUMNS", columns)
    overrides = ["model._target_=own.models.ConvolutionalNet", "trainer.limit_train_batches=0.25", "data.batch_size=30"]
    error = "data.batch_size=30 is the global batch size and 4 ranks can't share it equally: type " + "and so on " * 50
    write_run(outputs / "own" / "wednesday", state="failed", error=error, overrides=overrides)
    assert main(["list", "wednesday"]) == 0
    table = capsys.readouterr().out
    assert all(text in table for text in overrides)
    assert "failed: data.batch_size=30 is" in table
    assert len(table.splitlines()) <= 4 + 3  # with title and frame
    assert error in rows(capsys, "list", "wednesday")[0]["state"]  # whole, for scripts


@pytest.mark.usefixtures("outputs")
def test_compare_shows_only_what_differs(capsys: pytest.CaptureFixture[str]) -> None:
    found = {row[""]: row for row in rows(capsys, "compare", "monday", "0_seed=1")}
    assert found["optimizer.lr"]["mlp/monday"] == "0.1"
    assert found["optimizer.lr"]["mlp/sweep_1/0_seed=1"] == ""
    assert "monitor" not in found
    assert found["val/loss"]["mlp/sweep_1/0_seed=1"] == "0.2"


def test_selection_is_a_folder_or_a_part_of_name_or_overrides(outputs: Path) -> None:
    def names(*selection: str) -> set[str]:
        return {run.name for run in ledger.find(selection, outputs)}

    assert names("outputs/mlp/sweep_1") == {"0_seed=1", "1_seed=2"}
    assert names("outputs/mlp/monday") == {"monday"}
    assert names("optimizer.lr=0.1") == {"mlp/monday"}
    assert names("tues", "mlp/monday") == {"mlp/tuesday", "mlp/monday"}


@pytest.mark.usefixtures("outputs")
def test_markdown_is_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--format", "markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| run | state |")
    assert len({line.count("|") for line in lines}) == 1


def test_report_of_a_sweep_in_progress_is_written(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_sweep(outputs / "sweep_2", {"seed": "1"}, {"seed": "2"}, fixed=["optimizer=sgd"], experiment="digits_cnn")
    write_run(outputs / "sweep_2" / "0_seed=1", metrics={"val/loss": 0.2}, objective=0.2)
    assert main(["report", str(outputs / "sweep_2")]) == 0
    assert "waiting" in (outputs / "sweep_2" / "results.csv").read_text()
    assert "override /optimizer: sgd" in (outputs / "sweep_2" / "best.yaml").read_text()
    assert "The one finished run, of 2 in all" in capsys.readouterr().out


def test_tensorboard_is_given_exactly_the_chosen_runs_under_their_names(outputs: Path, tmp_path: Path) -> None:
    names = link(ledger.find(["outputs/mlp/sweep_1"], outputs), tmp_path / "links")
    assert names == ["0_seed=1", "1_seed=2"]
    assert (tmp_path / "links" / "0_seed=1").resolve() == (outputs / "mlp/sweep_1/0_seed=1/tensorboard").resolve()
    with pytest.raises(UserError, match="none of these 1 run"):
        link(ledger.find(["monday"], outputs), tmp_path / "others")


@pytest.mark.usefixtures("outputs")
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["list", "wednesday"], "no run is called wednesday"),
        (["list", "mlp/mondey"], "did you mean mlp/monday?"),
        (["compare", "monday"], "mlp/monday is one run, and two or more can be compared"),
        (["best", "tuesday"], "no finished run has a value of what they monitored"),
        (["best", "--metric", "nothing"], "no finished run has a value of --metric nothing"),
        (["report", "outputs/mlp"], "is no folder of a sweep"),
        (["list", "--outputs", "nowhere"], "no run is called nowhere or lies there"),
    ],
)
def test_mistake_is_told_in_a_sentence(capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str) -> None:
    assert main(arguments) == 1
    assert sentence in capsys.readouterr().err


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys, project.runs as r; r.parser().format_help(); print({'torch', 'hydra', 'numpy'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert result.stdout.strip() == "set()"


@pytest.mark.usefixtures("outputs")
def test_a_console_without_unicode_gets_a_table_in_ascii(tmp_path: Path) -> None:
    write_run(tmp_path / "outputs" / "mlp" / "ärger")
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}
    done = subprocess.run(
        [sys.executable, "-m", "project.runs", "list"], env=ascii_only, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"| mlp/monday" in done.stdout
    assert b"rger" in done.stdout
