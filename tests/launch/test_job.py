"""How a job is run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from project.launch import agent
from project.launch.job import run_job
from project.launch.run import Outcome, Run


def test_a_job_of_a_sweep_has_a_process_of_its_own_even_with_one_rank(
    compose: Callable[..., DictConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []

    def run_ranks(function: str, config: dict[str, Any], run: Run, num_ranks: int) -> Outcome:
        started.append(num_ranks)
        return Outcome({})

    monkeypatch.setattr(agent, "run_ranks", run_ranks)
    monkeypatch.setattr(agent, "warm_up", lambda: None)
    run_job("project.train:train", compose(), [], sweep_folder=tmp_path / "0")
    assert started == [1]
