"""Searches with Optuna."""

import fcntl
import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from project.errors import UserError
from project.launch.run import Outcome
from project.models import nets
from project.sweep import study
from project.sweep.pruning import pruning
from sweep.folders import trials_of

optuna = pytest.importorskip("optuna")
slow = pytest.mark.slow
State = optuna.trial.TrialState
RunSweep = Callable[..., Any]
LR = "optimizer.lr=tag(log,interval(1e-4,1e-1))"


def near_a_hundredth(config: DictConfig) -> float:
    """Best at lr = 0.01."""
    return -abs(math.log10(config.optimizer.lr) + 2)


@pytest.mark.parametrize("sampler", ["tpe", *(pytest.param(name, marks=slow) for name in ("gp", "random", "cma_es"))])
def test_sampler_searches_the_space_and_the_best_is_found_again(run_sweep: RunSweep, sampler: str) -> None:
    if sampler == "cma_es" and importlib.util.find_spec("cmaes") is None:
        pytest.skip("cmaes is not installed")
    settings = [f"sweep/sampler={sampler}", "sweep.n_trials=4"]
    settings += ["+sweep.sampler.n_startup_trials=2"] if sampler != "random" else []
    sweep = run_sweep(near_a_hundredth, "sweep=optuna", LR, "model.net.width=range(8,33,8)", *settings)
    trials = trials_of(sweep)
    assert [trial.state for trial in trials] == [State.COMPLETE] * 4
    assert {trial.params["model.net.width"] for trial in trials} <= {8, 16, 24, 32}
    best = max(trials, key=lambda trial: trial.value)
    assert f"Run {best.number} of" in (sweep.folder / "best.yaml").read_text()
    # What Optuna holds is what the jobs ran with.
    assert [float(job.parameters["optimizer.lr"]) for job in sweep.jobs] == [t.params["optimizer.lr"] for t in trials]


def test_grid_tries_every_combination_once(run_sweep: RunSweep) -> None:
    grid = ["optimizer.lr=0.1,0.01", "model.net.width=range(8,25,8)", "sweep/sampler=grid"]
    trials = trials_of(run_sweep(near_a_hundredth, "sweep=optuna", *grid))
    assert len({(t.params["optimizer.lr"], t.params["model.net.width"]) for t in trials}) == len(trials) == 6


@slow
def test_several_objectives_are_searched_together(run_sweep: RunSweep) -> None:
    def two(config: DictConfig) -> Outcome:
        lr = float(config.optimizer.lr)
        return Outcome({"val/accuracy": lr}, objective=lr, train_s=lr * 2)

    objectives = "sweep.objectives={val/accuracy:max,train_s:min}"
    sweep = run_sweep(two, "sweep=optuna", LR, objectives, "sweep/sampler=nsga2", "sweep.n_trials=4")
    assert all(trial.values == [trial.values[0], trial.values[0] * 2] for trial in trials_of(sweep))
    assert "val/accuracy" in (sweep.folder / "results.csv").read_text()


@slow
@pytest.mark.parametrize("storage", ["sqlite", "journal"])
def test_interrupted_search_goes_on_with_the_same_command(run_sweep: RunSweep, storage: str) -> None:
    command = ["sweep=optuna", LR, "sweep.n_trials=5", f"sweep.storage={storage}", "sweep/sampler=random"]
    begun: list[float] = []

    def interrupted(config: DictConfig) -> float:
        begun.append(config.optimizer.lr)
        if len(begun) == 3:
            raise KeyboardInterrupt
        return near_a_hundredth(config)

    with pytest.raises(KeyboardInterrupt):
        run_sweep(interrupted, *command)
    sweep = run_sweep(interrupted, *command)
    states = [trial.state for trial in trials_of(sweep, storage)]
    assert states == [State.COMPLETE] * 2 + [State.FAIL] + [State.COMPLETE] * 3
    assert begun[3] == begun[2]  # what was under way is tried again
    assert len(set(begun)) == 5  # and nothing else is, though the sampler begins anew
    rows = (sweep.folder / "results.csv").read_text().splitlines()
    assert [row.split(",")[1] for row in rows[1:]] == ["finished"] * 2 + ["interrupted"] + ["finished"] * 3


@slow
def test_finished_search_is_extended_by_more_trials(run_sweep: RunSweep, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["sweep=optuna", LR]
    first = run_sweep(near_a_hundredth, *command, "sweep.n_trials=2")
    assert run_sweep(near_a_hundredth, *command, "sweep.n_trials=2").folder == first.folder
    told = "2 trials are finished: type sweep.n_trials=N for more, or sweep.study=NAME to search anew"
    assert told in capsys.readouterr().out
    assert len(trials_of(run_sweep(near_a_hundredth, *command, "sweep.n_trials=3"))) == 3


def test_a_search_goes_on_with_word_of_code_that_has_changed(
    run_sweep: RunSweep, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "searched_model.py"
    code = "import lightning as L\nclass Model(L.LightningModule):\n    pass\n"
    command = ["sweep=optuna", LR, "model._target_=searched_model.Model", "sweep.n_trials=1"]
    told = "The code of searched_model.Model has changed since the study began"
    module.write_text(code + "# with a mistake\n")
    with pytest.raises(UserError, match="1 of 1 jobs"):
        run_sweep(lambda config: math.nan, *command)
    module.write_text(code)
    for _ in range(2):
        first = run_sweep(near_a_hundredth, *command)
        assert told not in capsys.readouterr().out
    module.write_text(code + "# better\n")
    assert run_sweep(near_a_hundredth, *command).folder == first.folder
    out = capsys.readouterr().out
    assert told in out
    assert out.count("sweep.study=NAME to search anew") == 2
    assert run_sweep(near_a_hundredth, *command, "sweep.study=anew").folder != first.folder
    assert told not in capsys.readouterr().out


def test_source_is_found_of_classes_and_their_methods() -> None:
    targets = [
        "project.data.digits.Digits.facts",
        "project.models.nets.MLP",
        "no_such.Model",
        "__main__.Model",
        "Model",
    ]
    files = [study._source_file(target) for target in targets]
    assert [file and file.name for file in files[:3]] == ["digits.py", Path(nets.__file__).name, None]
    assert files[4] is None
    config = OmegaConf.create({"model": {"_target_": "no_such.Model"}, "data": {"_target_": "builtins.dict"}})
    assert study.source_digests(config) == {}


@pytest.mark.slow
def test_failed_trials_are_recorded_and_the_search_goes_on(run_sweep: RunSweep) -> None:
    values = iter([1.0, float("nan"), 2.0])

    def fails_at_last(config: DictConfig) -> float:
        for value in values:
            return value
        raise RuntimeError("it ran out of memory")

    command = ["sweep=optuna", LR, "sweep.n_trials=4", "sweep.study=mine"]
    with pytest.raises(UserError) as told:
        run_sweep(fails_at_last, *command)
    lines = str(told.value).splitlines()
    assert lines[0] == "2 of 4 jobs of the sweep failed:"
    assert lines[1].endswith(": it has no finite val/accuracy")
    assert lines[2].endswith(": RuntimeError: it ran out of memory")
    # The same command has two trials left.
    sweep = run_sweep(near_a_hundredth, *command)
    states = [trial.state for trial in trials_of(sweep)]
    assert states == [State.COMPLETE, State.FAIL, State.COMPLETE, State.FAIL, State.COMPLETE, State.COMPLETE]


def test_choice_that_does_not_compose_fails_its_trial_alone(run_sweep: RunSweep) -> None:
    with pytest.raises(UserError, match="1 of 2 jobs of the sweep failed.*\n.*optimizer=nothing can't be chosen"):
        run_sweep(lambda config: 1.0, "sweep=optuna", "optimizer=adamw,nothing", "sweep/sampler=grid")


def test_trials_are_handed_to_the_launcher_in_batches(run_sweep: RunSweep, monkeypatch: pytest.MonkeyPatch) -> None:
    from hydra._internal.core_plugins.basic_launcher import BasicLauncher

    sizes = []
    launch = BasicLauncher.launch

    def count(self: BasicLauncher, job_overrides: Any, initial_job_idx: int) -> Any:
        sizes.append(len(job_overrides))
        return launch(self, job_overrides, initial_job_idx)

    monkeypatch.setattr(BasicLauncher, "launch", count)
    run_sweep(near_a_hundredth, "sweep=optuna", LR, "sweep.n_trials=3", "sweep.n_jobs=2")
    assert sizes == [2, 1]


@slow
def test_space_in_the_config_is_searched_and_what_is_typed_wins(run_sweep: RunSweep, tmp_path: Path) -> None:
    group = tmp_path / "mine" / "sweep"
    group.mkdir(parents=True)
    (group / "widths.yaml").write_text(
        "defaults: [optuna]\nn_trials: 3\nparams:\n  model.net.width: [8, 16]\n  optimizer.lr: 0.1,0.2\n  seed: 7\n"
    )
    overrides = [f"hydra.searchpath=[file://{group.parent}]", "sweep=widths", "optimizer.lr=0.3"]
    sweep = run_sweep(lambda config: float(config.seed + config.optimizer.lr), *overrides)
    assert all(job.parameters.keys() == {"model.net.width"} for job in sweep.jobs)
    assert {trial.value for trial in trials_of(sweep)} == {7.3}


def test_another_space_under_the_same_name_is_refused(run_sweep: RunSweep) -> None:
    run_sweep(near_a_hundredth, "sweep=optuna", LR, "sweep.n_trials=1", "sweep.study=mine")
    with pytest.raises(UserError, match=r"searches optimizer.lr=tag.*sweep.study=ANOTHER_NAME"):
        run_sweep(near_a_hundredth, "sweep=optuna", "optimizer.lr=0.1,0.2", "sweep.n_trials=1", "sweep.study=mine")


def test_study_that_is_being_searched_is_left_alone(run_sweep: RunSweep) -> None:
    sweep = run_sweep(near_a_hundredth, "sweep=optuna", LR, "sweep.n_trials=1", "sweep.study=mine")
    with (sweep.folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="is being searched by another process"):
            run_sweep(near_a_hundredth, "sweep=optuna", LR, "sweep.n_trials=2", "sweep.study=mine")


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ([], "sweep=optuna has nothing to search"),
        ([LR, "sweep.n_trials=0"], "sweep.n_trials=0 can't be: type a whole number from 1"),
        ([LR, "sweep.n_jobs=x"], "sweep.n_jobs=x can't be"),
        ([LR, "sweep.storage=nowhere"], "sweep.storage=nowhere can't be: type journal, sqlite, or the URL"),
        ([LR, "sweep/sampler=grid"], "optimizer.lr is an interval"),
        ([LR, "+sweep.sampler.nonsense=1"], "sweep.sampler: optuna.samplers.TPESampler can't be built: .*nonsense"),
        ([LR, "sweep.objectives={val/accuracy:best}"], "val/accuracy=best can't be"),
        (["monitor=val/accuracy,val/loss"], "monitor=val/accuracy,val/loss: .*must be the same in all"),
        ([LR, "+foo=1"], r"\+foo would be without effect"),
    ],
)
def test_what_can_not_be_searched_is_told_before_there_is_a_folder(
    run_sweep: RunSweep, tmp_path: Path, overrides: list[str], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        run_sweep(near_a_hundredth, "sweep=optuna", *overrides)
    assert list(tmp_path.iterdir()) == []


# examples
def test_trial_that_monitors_something_else_fails_alone(run_sweep: RunSweep) -> None:
    command = ["sweep=optuna", "experiment=digits_mlp,text_gpt", "sweep/sampler=grid"]
    told = r"1 of 2 jobs .*\n.*it monitors val/bits_per_byte min, and the search compares val/accuracy max"
    with pytest.raises(UserError, match=told):
        run_sweep(lambda config: 1.0, *command)


# /examples
@pytest.mark.parametrize(
    ("objectives", "number"),
    [(None, 1), ({"val/accuracy": "max"}, 1), ({"train_s": "min"}, 0), ({"val/accuracy": "max", "train_s": "min"}, 0)],
)
def test_trials_are_pruned_by_what_they_monitor_alone(objectives: dict[str, str] | None, number: int) -> None:
    job = {"trial": 0, "folder": "a", "study": "b", "storage": "journal", "varied": []}
    settings = {"job": job, "pruner": {"_target_": "optuna.pruners.MedianPruner"}, "objectives": objectives}
    assert len(pruning({"monitor": "val/accuracy", "sweep": settings})) == number
