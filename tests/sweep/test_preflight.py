"""Sweeps that can't work are refused once, before there is a folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from project.errors import UserError

RunSweep = Callable[..., Any]
slow = pytest.mark.slow


def ran(config: DictConfig) -> float:
    """What each job comes to."""
    return 1.0


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ("+foo=1 seed=1,2", r"\+foo would be without effect"),
        pytest.param("+foo=1,2", r"\+foo would be without effect", marks=slow),
        pytest.param("+foo=range(3)", r"\+foo would be without effect", marks=slow),
        ("callbacks=pruning trainer/strategy=fsdp seed=1,2", "callbacks=pruning needs the whole model"),
        ("trainer.max_epochs=0 seed=1,2", "trainer.max_epochs=0 can't be"),
        pytest.param("monitor=val/loss seed=1,2", "monitor=val/loss with mode=max would keep the highest", marks=slow),
        ("data.batch_size=63 trainer.devices=2 trainer.accelerator=cpu seed=1,2", "2 ranks can't share it equally"),
        pytest.param("data.val_fraction=??? seed=1,2", "data.val_fraction has no value", marks=slow),
    ],
)
def test_what_all_jobs_would_be_refused_for_is_told_once_and_leaves_no_folder(
    run_sweep: RunSweep, tmp_path: Path, overrides: str, sentence: str
) -> None:
    with pytest.raises(UserError, match=f"^[^\n]*{sentence}[^\n]*$"):
        run_sweep(ran, *overrides.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "overrides",
    [
        "trainer.max_epochs=0,1",
        pytest.param("trainer.max_epochs=0,1,0", marks=slow),  # by the first and the last alone one would not know
        pytest.param("callbacks=pruning trainer/strategy=fsdp,ddp,fsdp", marks=slow),
        pytest.param("data.batch_size=range(63,66) trainer.devices=2 trainer.accelerator=cpu", marks=slow),
    ],
)
def test_what_some_values_are_refused_for_is_left_to_their_jobs(run_sweep: RunSweep, overrides: str) -> None:
    numbers = []

    def note(config: DictConfig) -> float:
        numbers.append(config.seed)
        return 1.0

    run_sweep(note, *overrides.split())
    assert len(numbers) >= 2


def test_jobs_of_a_grid_that_are_all_refused_each_in_its_own_words_are_told_together_and_leave_no_folder(
    run_sweep: RunSweep, tmp_path: Path
) -> None:
    typed = "data.batch_size=63,65 trainer.devices=2 trainer.accelerator=cpu seed=1,2"
    with pytest.raises(UserError, match="^all 4 jobs of the sweep would be refused:\n") as caught:
        run_sweep(ran, *typed.split())
    assert [line.split(" is ")[0] for line in str(caught.value).splitlines()[1:]] == [
        f"  batch_size={size},seed={seed}: data.batch_size={size}" for size in (63, 65) for seed in (1, 2)
    ]
    assert list(tmp_path.iterdir()) == []


def test_jobs_of_a_grid_that_will_be_refused_are_told_before_the_others_run(
    run_sweep: RunSweep, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[str] = []

    def note(config: DictConfig) -> float:
        told.append(capsys.readouterr().out)
        return 1.0

    run_sweep(note, "data.batch_size=64,63", "trainer.devices=1,2", "trainer.accelerator=cpu")
    assert told[0].startswith(
        "1 of 4 jobs will be refused:\n  batch_size=63,devices=2: data.batch_size=63 is the global"
    )
    assert len(told) == 4  # these only pretend to train


@slow
def test_of_many_refused_jobs_some_are_shown(run_sweep: RunSweep) -> None:
    with pytest.raises(UserError, match=r"all 12 jobs[^$]*data\.batch_size=85 [^\n]*\n  and 2 more$"):
        run_sweep(ran, "data.batch_size=range(67,90,2)", "trainer.devices=2", "trainer.accelerator=cpu")


@slow
def test_what_other_hosts_have_is_not_looked_for_here(run_sweep: RunSweep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)
    typed = ["trainer.precision=16-mixed", "trainer.devices=2", "seed=1,2"]
    with pytest.raises(UserError, match="needs a GPU, and this run is on the CPU"):
        run_sweep(ran, *typed)
    monkeypatch.setattr("project.sweep.preflight.HERE", ())
    run_sweep(ran, *typed)
    with pytest.raises(UserError, match=r"\+foo would be without effect"):
        run_sweep(ran, *typed, "+foo=1")


@slow
def test_what_is_left_out_of_the_config_is_told_once_for_the_sweep(
    run_sweep: RunSweep, capsys: pytest.CaptureFixture[str]
) -> None:
    # Identity takes any argument: of three classes, the second alone has something to tell.
    nets = "model.net._target_=torch.nn.Identity,torch.nn.Flatten,torch.nn.Identity"
    run_sweep(ran, nets, "optimizer.lr=0.1,0.2")
    assert capsys.readouterr().out.count("Left out of the config") == 1
    run_sweep(ran, "model.net._target_=torch.nn.Flatten", "optimizer.lr=0.1,0.2")
    assert capsys.readouterr().out.count("Left out of the config") == 1
    run_sweep(ran, "optimizer.lr=0.1,0.2")
    assert "Left out" not in capsys.readouterr().out
