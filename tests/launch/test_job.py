"""How a job is run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from project.launch import agent
from project.launch.job import _grouped, _told, run_job
from project.launch.run import Outcome, Run

OWN_NET = ["model.net._target_=torch.nn.Flatten"]  # which takes none of the net's arguments


@pytest.mark.parametrize("in_sweep", [False, True])
def test_a_job_of_a_sweep_leaves_it_to_the_sweep_to_tell_of_it(
    compose: Callable[..., DictConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    in_sweep: bool,
) -> None:
    monkeypatch.setattr(agent, "run_ranks", lambda *_: Outcome({"val/loss": 0.5}))
    monkeypatch.setattr(agent, "warm_up", lambda: None)
    typed = [*OWN_NET, "trainer.devices=2", "trainer.accelerator=cpu", f"paths.outputs={tmp_path}"]
    run_job("project.train:train", compose(*typed), typed, sweep_folder=tmp_path / "0" if in_sweep else None)
    out = capsys.readouterr().out
    if in_sweep:
        assert out == ""
    else:
        assert out.count("Left out of the config") == out.count("train digits_mlp on digits, 2 ranks") == 1
        assert "val/loss" in out


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


@pytest.mark.parametrize(
    ("full", "told"),
    [
        ("0", "data (a, b, c and 2 more), model (net, lr, width, depth)"),
        ("1", "data (a, b, c, d, e), model (net, lr, "),
    ],
)
def test_of_many_keys_that_are_left_out_the_first_are_named(
    monkeypatch: pytest.MonkeyPatch, full: str, told: str
) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", full)
    keys = [*(f"data.{key}" for key in "abcde"), "model.net", "model.lr", "model.width", "model.depth"]
    assert _grouped(keys).startswith(told)


def test_values_that_win_over_defaults_are_told_in_the_number_that_they_are() -> None:
    one = {"data.batch_size=64": "data.batch_size=32"}
    assert _told(one) == (
        "The config's data.batch_size=64 wins over the class's own default: type data.batch_size=32 for that"
    )
    two = _told(one | {"data.shuffle=true": "data.shuffle=false"})
    assert "data.batch_size=64, data.shuffle=true win over the classes' own defaults" in two
    assert two.endswith("type data.batch_size=32 data.shuffle=false for those")
