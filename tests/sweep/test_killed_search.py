"""A search of real trainings on two ranks each, killed in its middle."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from project.sweep import record
from sweep.folders import trials_of

optuna = pytest.importorskip("optuna")
State = optuna.trial.TrialState

# Tells with which parameters each rank trains.
MODULE = """
from lightning.pytorch.callbacks import Callback

class Tell(Callback):
    def on_train_start(self, trainer, module):
        group = trainer.optimizers[0].param_groups[0]
        print("trained with", group["lr"], group["weight_decay"], flush=True)
"""
COMMAND = (
    "sweep=optuna",
    "optimizer.lr=tag(log,interval(1e-5,1e-1))",
    "optimizer.weight_decay=interval(0,0.1)",
    "sweep/sampler=random",
    "sweep.pruner.n_startup_trials=2",
    "scheduler=none",
    "callbacks=none",
    "+callbacks.tell._target_=own.Tell",
    "logger=none",
    "test=false",
    "trainer.devices=2",
    "trainer.max_epochs=3",
    "trainer.limit_train_batches=3",
    "trainer.limit_val_batches=1",
    "trainer.num_sanity_val_steps=0",
    "trainer.enable_progress_bar=false",
    "trainer.enable_model_summary=false",
)


@pytest.mark.slow
def test_search_that_was_killed_goes_on_to_its_end(run_cli: Any, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(MODULE)
    process = subprocess.Popen(
        [sys.executable, "-m", "project.train", *COMMAND],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        end = time.monotonic() + 120
        while len(list(tmp_path.glob("outputs/*/*/*/metrics.json"))) < 6 or not running(tmp_path):
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.02)
    finally:
        process.kill()  # SIGKILL
        process.wait()

    result = run_cli("train", *COMMAND, env={"OMP_NUM_THREADS": "1"}, timeout_s=250)
    assert result.returncode == 0, result.stderr
    (path,) = tmp_path.glob("outputs/*/*/sweep.json")
    sweep = record.read(path.parent)
    trials = trials_of(sweep)
    by_state = {state: [trial for trial in trials if trial.state == state] for state in State}
    over = [*by_state[State.COMPLETE], *by_state[State.PRUNED]]
    assert len(over) == 20
    assert len(trials) == 21
    assert len(by_state[State.FAIL]) == 1
    assert len({trial.params["optimizer.lr"] for trial in over}) == 20  # none is tried twice
    assert by_state[State.PRUNED]
    assert all(len(trial.intermediate_values) < 3 for trial in by_state[State.PRUNED])
    assert all(len(trial.intermediate_values) == 3 for trial in by_state[State.COMPLETE])
    for trial in over:
        folder = sweep.jobs[trial.number].folder
        told = [line for rank in (0, 1) for line in lines(folder, rank) if line.startswith("trained with")]
        assert len(told) == 2
        assert told[0] == told[1]
        lr, weight_decay = map(float, told[0].split()[2:])
        assert lr == pytest.approx(trial.params["optimizer.lr"])
        assert weight_decay == pytest.approx(trial.params["optimizer.weight_decay"])
        assert json.loads((folder / "metrics.json").read_text())["pruned"] == (trial.state == State.PRUNED)


def lines(folder: Path, rank: int) -> list[str]:
    return (folder / "ranks" / f"rank_{rank}.log").read_text().splitlines()


def running(outputs: Path) -> bool:
    """Whether a trial is under way."""
    return any(json.loads(path.read_text())["state"] == "running" for path in outputs.glob("outputs/*/*/*/state.json"))
