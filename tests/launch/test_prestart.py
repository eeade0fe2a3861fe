"""The ranks' server is there before the config is, and goes with the command."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from project.launch.prestart import will_start_ranks


@pytest.mark.parametrize(
    ("typed", "will"),
    [
        ("trainer.devices=4", True),
        ("trainer.devices=auto", True),
        ("trainer.devices=[0,1] trainer/strategy=fsdp", True),
        ("trainer.devices=2 trainer/strategy=dp", False),
        ("trainer.devices=2 trainer.strategy=layer_split", False),
        ("trainer.devices=1", False),
        ("optimizer.lr=0.1", False),
        ("-m optimizer.lr=0.1,0.01", True),
        ("-m optimizer.lr=0.1,0.01 hydra/launcher=joblib", False),
        ("trainer.devices=2 trainer.num_nodes=2", False),
        ("trainer.devices=4 --help", False),
        ("trainer.devices=4 --cfg job", False),
    ],
)
def test_ranks_are_expected_where_they_are_typed(typed: str, will: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "RANK", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    assert will_start_ranks(["train", *typed.split()]) == will


def test_under_torchrun_the_ranks_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("RANK", "0")
    assert not will_start_ranks(["train", "trainer.devices=4"])


@pytest.mark.slow
def test_a_command_that_ends_with_an_error_leaves_no_server(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "project.train", "trainer.devices=4", "optimizer.lr=-1", "paths.outputs=out"]
    mark = f"AHEAD_{os.getpid()}"
    ended = subprocess.run(command, cwd=tmp_path, env=os.environ | {mark: "1"}, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "error: optimizer.lr=-1" in ended.stderr
    left = [p for p in psutil.process_iter(["environ"]) if mark in (p.info["environ"] or {})]
    assert left == []
