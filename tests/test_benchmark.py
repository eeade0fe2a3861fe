"""The benchmark as a command, with settings that are too small to mean anything."""

import csv
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.slow

TINY = ("benchmark.repeats=1", "benchmark.timeout_s=100")


def results(folder: Path) -> tuple[Path, dict[str, dict[str, Any]]]:
    """The run folder of the only benchmark, and its rows by name."""
    (run_dir,) = (folder / "outputs").iterdir()
    assert run_dir.name.startswith("benchmark_")
    rows = json.loads((run_dir / "benchmark.json").read_text())["rows"]
    with (run_dir / "benchmark.csv").open(newline="") as file:
        assert [line["what"] for line in csv.DictReader(file)] == [row["what"] for row in rows]
    return run_dir, {row["what"]: row for row in rows}


def loss_of(run_dir: Path, contender: str) -> float:
    """The last training loss that a contender reported."""
    loss: float = json.loads((run_dir / "runs" / "0" / contender / "report.json").read_text())["loss"]
    return loss


SHORT = ("benchmark=strategies", "benchmark.steps=6", "benchmark.warmup_steps=2", "benchmark.step_ms=null")


@pytest.mark.timeout(400)
def test_strategies_train_the_same_by_hand(run_cli: Any, tmp_path: Path) -> None:
    result: subprocess.CompletedProcess[str] = run_cli("benchmark", *TINY, *SHORT, timeout_s=380)
    run_dir, rows = results(tmp_path)
    assert result.returncode == 0, result.stderr
    assert list(rows) == ["ddp on 2 devices", "dp on 2 devices", "fsdp on 2 devices"]
    for what, row in rows.items():
        assert what in result.stdout
        assert row["times_as_fast"]["median"] > 0
        # Not only as fast: the same batches, weights and learning rates, to the last step.
        own, by_hand = (loss_of(run_dir, f"{side}_{what.replace(' ', '_')}") for side in ("template", "hand-written"))
        assert own == pytest.approx(by_hand, abs=1e-5)


def test_combination_that_fails_is_a_row(run_cli: Any, tmp_path: Path) -> None:
    only = ("benchmark.strategies=[ddp]", "benchmark.devices=3")
    result: subprocess.CompletedProcess[str] = run_cli("benchmark", *TINY, *SHORT, *only)
    _, rows = results(tmp_path)
    assert result.returncode == 1
    assert "error: 1 of 1 rows failed: template ddp on 3 devices: data.batch_size=64" in result.stderr
    assert "can't share it equally" in rows["ddp on 3 devices"]["error"]


@pytest.mark.timeout(400)
def test_overhead_is_measured_of_the_same_training(run_cli: Any, tmp_path: Path) -> None:
    small = ("benchmark.measured_s=0.02", "benchmark.parts=[tiny,epoch,config]", "benchmark.epochs=1")
    result: subprocess.CompletedProcess[str] = run_cli("benchmark", "benchmark=overhead", *TINY, *small, timeout_s=380)
    run_dir, rows = results(tmp_path)
    assert result.returncode == 0, result.stderr
    assert len(rows) == 6
    assert all(row["times_as_fast"]["low"] > 0 for row in rows.values())
    by_hand = loss_of(run_dir, "hand-written_tiny_steps")
    for other in ("template", "bare_Lightning", "popular_pattern"):
        assert loss_of(run_dir, f"{other}_tiny_steps") == pytest.approx(by_hand, abs=1e-5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("benchmark=speed", "type benchmark="),
        ("benchmark=overhead benchmark.tracking_s=0", "benchmark.tracking_s= with a number of seconds above 0"),
        ("benchmark.repeats=0", "benchmark.repeats= with a whole number from 1"),
        ("benchmark=strategies benchmark.strategies=[ddp,deepspeed]", "type benchmark.strategies=[ddp,dp,fsdp]"),
        ("benchmark=strategies benchmark.devices=1", "or benchmark=scaling"),
        ("benchmark.strategies=ddp", "a list of names, as [ddp,dp]"),
        ("benchmark.devices=[0,2]", "a whole number from 1, or a list of such"),
        ("benchmark.kinds=[big]", "a list of strong and weak"),
        ("benchmark=optimize benchmark.budget_s=-1", "a number of seconds above 0"),
        ("benchmark=optimize data.batch_size=7.5", "a whole number from 1"),
        ("benchmark=overhead benchmark.parts=[tinny]", "a list of tiny, steps"),
        ("benchmark.step=3", "did you mean benchmark.steps?"),
        ("benchmark.timeout_s=0", "a number of seconds above 0"),
        ("trainer.devices=2", "benchmark.devices"),
        ("benchmark=strategies experiment=text_gpt", "type experiment=digits_mlp"),  # example
        ("benchmark=strategies ~model.net.width", "benchmark.step_ms=null"),
    ],
)
def test_bad_input_gets_a_sentence(run_cli: Any, arguments: str, words: str) -> None:
    result = run_cli("benchmark", *arguments.split())
    assert result.returncode == 1
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert words in line


STARVED = ("data=synthetic", "data.delay_ms=5", "data.image_shape=[1,4,4]", "data.length=3200", "data.batch_size=16")


@pytest.mark.timeout(300)
def test_scaling_is_measured_with_latency_and_a_combination_that_fails_is_a_row(run_cli: Any, tmp_path: Path) -> None:
    few = ("benchmark.repeats=1", "benchmark.steps=6", "benchmark.warmup_steps=2", "benchmark.calls=3")
    result = run_cli("benchmark", *few, "benchmark.strategies=[ddp,dpp]", "benchmark.kinds=[weak]", timeout_s=280)
    assert result.returncode == 1
    assert "dpp on 1, weak: trainer/strategy=dpp can't be chosen" in result.stderr
    (run_dir,) = (tmp_path / "outputs").iterdir()
    rows = json.loads((run_dir / "benchmark.json").read_text())["rows"]
    training = {(row["strategy"], row["devices"]): row for row in rows if row["what"] == "training"}
    assert training.keys() == {("ddp", 1), ("ddp", 2), ("dpp", 1), ("dpp", 2)}
    assert training["dpp", 2]["error"]
    for devices in (1, 2):
        row = training["ddp", devices]
        assert row["samples_per_s"]["median"] == pytest.approx(devices * row["samples_per_s_per_device"])
        assert 0 < row["step_ms"]["p50"] <= row["step_ms"]["p99"]
        assert sum(row["parts_ms"].values()) > 0
        assert row["memory_bytes"] > 0
    ratio = training["ddp", 2]["samples_per_s_per_device"] / training["ddp", 1]["samples_per_s_per_device"]
    assert training["ddp", 2]["efficiency"] == pytest.approx(ratio)
    assert [row["batch_size"] for row in rows if row["what"] == "latency"] == [1, 16, 256]
    assert (run_dir / "scaling.png").stat().st_size > 10_000
    assert list((run_dir / "tensorboard").glob("events*"))


@pytest.mark.timeout(300)
def test_optimizing_finds_workers_for_a_starved_loader(run_cli: Any, tmp_path: Path) -> None:
    short = ("benchmark=optimize", "benchmark.measured_s=2", "benchmark.repeats=1", "benchmark.budget_s=60")
    result = run_cli("benchmark", *short, *STARVED, timeout_s=280)
    assert result.returncode == 0, result.stderr
    (run_dir,) = (tmp_path / "outputs").iterdir()
    rows = json.loads((run_dir / "benchmark.json").read_text())["rows"]
    kept = [row for row in rows if row["verdict"] == "kept"]
    assert kept[0]["override"].startswith("data.num_workers=")
    assert kept[-1]["gain"] > 1.4  # nearly 2 for each doubling; other work on this machine takes its share
    assert not any(row["override"].startswith("data.batch_size=") for row in kept)
    again = run_cli("train", f"experiment={run_dir}/optimized.yaml", "--cfg", "job")
    assert "delay_ms: 5" in again.stdout
    workers = [row["override"] for row in kept if row["override"].startswith("data.num_workers=")][-1]
    assert f"num_workers: {workers.partition('=')[2]}" in again.stdout


def measured_by(benchmark: psutil.Process) -> list[psutil.Process]:
    return [child for child in benchmark.children() if any("project.benchmarking" in word for word in child.cmdline())]


def test_measured_process_ends_with_the_benchmark(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "project.benchmark", "benchmark=overhead", "benchmark.parts=[tiny]"]
    benchmark = psutil.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    end = time.monotonic() + 60
    while not (measured := measured_by(benchmark)) and time.monotonic() < end:
        time.sleep(0.05)
    benchmark.terminate()
    assert benchmark.wait(30) == 143
    assert measured
    assert not any(process.is_running() for process in measured)


def test_ranks_that_a_launcher_started_are_refused(run_cli: Any) -> None:
    result = run_cli("benchmark", env={"RANK": "0", "TORCHELASTIC_RUN_ID": "job"})
    assert result.returncode == 1
    assert "error: benchmark starts its ranks itself: start it once, without torchrun" in result.stderr


def test_help_and_config_import_neither_torch_nor_lightning(run_cli: Any, tmp_path: Path) -> None:
    for name in ("torch", "lightning"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('a heavy import')")
    for arguments in (["--help"], ["--cfg", "job", "benchmark=overhead"]):
        result = run_cli("benchmark", *arguments, env={"PYTHONPATH": str(tmp_path)})
        assert result.returncode == 0
        assert "a heavy import" not in result.stdout + result.stderr
        assert "strategies" in result.stdout or "tiny" in result.stdout
