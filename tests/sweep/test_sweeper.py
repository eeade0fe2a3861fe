"""Grids: every combination, whatever becomes of one."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra.core.plugins import Plugins
from hydra.errors import MissingConfigException
from omegaconf import DictConfig

from project.errors import UserError
from project.launch.run import Outcome
from project.launch.run_state import recorded
from project.sweep.plugins import go_on_with_sweep
from project.sweep.results import rows_of

RunSweep = Callable[..., Any]


def test_job_that_fails_is_marked_and_the_sweep_goes_on(
    run_sweep: RunSweep, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails_once(config: DictConfig) -> float:
        if config.seed == 2:
            raise RuntimeError("out of luck")
        return float(config.seed)

    with pytest.raises(UserError) as told:
        run_sweep(fails_once, "seed=1,2,3", "optimizer.lr=0.1,0.2")
    lines = str(told.value).splitlines()
    assert lines[0] == "2 of 6 jobs of the sweep failed:"
    assert [line.rpartition(": ")[2] for line in lines[1:]] == ["out of luck"] * 2
    out = capsys.readouterr().out
    assert "The best of 4 finished runs, of 6 in all" in out
    assert "sweep: 4 of 6 done, 2 failed; best val/accuracy 3 (seed=3,lr=0.1)" in out


def test_every_job_has_a_folder_named_after_what_varies(run_sweep: RunSweep) -> None:
    sweep = run_sweep(lambda config: 1.0, "optimizer.lr=0.1,0.2", "seed=1,2", "trainer.max_epochs=3")
    names = [job.folder.name for job in sweep.jobs]
    assert names == ["0_lr=0.1,seed=1", "1_lr=0.1,seed=2", "2_lr=0.2,seed=1", "3_lr=0.2,seed=2"]
    assert all((job.folder / "metrics.json").exists() for job in sweep.jobs)


@pytest.mark.parametrize("search", [[], ["sweep=optuna"]])
def test_a_name_for_the_folders_of_all_jobs_is_refused(run_sweep: RunSweep, tmp_path: Path, search: list[str]) -> None:
    with pytest.raises(UserError, match=r"^hydra\.sweep\.subdir=same has no effect on a sweep, .* leave it out"):
        run_sweep(lambda config: 1.0, *search, "seed=1,2", "hydra.sweep.subdir=same")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_seed_differs_only_where_the_sweep_says_so(run_sweep: RunSweep) -> None:
    seeds: list[int | None] = []

    def note(config: DictConfig) -> float:
        seeds.append(config.seed)
        return 1.0

    run_sweep(note, "seed=null", "optimizer.lr=0.1,0.2")
    assert seeds[0] is not None
    assert seeds[0] == seeds[1]
    run_sweep(note, "seed=1,2", "optimizer.lr=0.1")
    assert seeds[2:] == [1, 2]


def test_what_does_not_compose_is_refused_before_any_job_runs(run_sweep: RunSweep, tmp_path: Path) -> None:
    def never(config: DictConfig) -> float:
        raise AssertionError("a job ran")

    with pytest.raises(MissingConfigException, match="optimizer/nothing"):
        run_sweep(never, "optimizer=adamw,nothing")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("typed", ["monitor=val/accuracy,val/loss", "mode=min,max"])
def test_what_jobs_are_compared_by_is_not_varied(run_sweep: RunSweep, tmp_path: Path, typed: str) -> None:
    with pytest.raises(UserError, match=f"^{typed}: .*must be the same in all: type one value.*sweep.objectives="):
        run_sweep(lambda config: 1.0, typed)
    assert list(tmp_path.iterdir()) == []


def outcome(config: DictConfig) -> Outcome:
    """The best value of what is monitored is 0.9; at the end it is 0.5, and the test says the learning rate."""
    return Outcome({"val/accuracy": 0.5, "test/accuracy": float(config.optimizer.lr)}, objective=0.9)


@pytest.mark.slow
def test_jobs_that_monitor_different_metrics_are_compared_by_another(run_sweep: RunSweep) -> None:
    objective = "sweep.objectives={test/accuracy:max}"
    sweep = run_sweep(outcome, "monitor=val/accuracy,test/accuracy", "optimizer.lr=0.1,0.2", objective)
    assert [row.objectives for row in rows_of(sweep)] == [(0.1,), (0.2,)] * 2
    assert "Run 1 of " in (sweep.folder / "best.yaml").read_text()
    assert "test/accuracy" in (sweep.folder / "results.csv").read_text().splitlines()[0].split(",")


# examples
def test_experiments_that_monitor_different_metrics_have_no_best(
    run_sweep: RunSweep, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = run_sweep(outcome, "experiment=digits_mlp,text_gpt")
    out = capsys.readouterr().out
    assert out.count("The jobs do not monitor the same (val/accuracy max, val/bits_per_byte min), so none") == 1
    assert "best val" not in out
    assert not (sweep.folder / "best.yaml").exists()
    assert [row.state for row in rows_of(sweep)] == ["finished"] * 2


# /examples
def test_launcher_that_breaks_down_fails_its_jobs(run_sweep: RunSweep, monkeypatch: pytest.MonkeyPatch) -> None:
    from hydra._internal.core_plugins.basic_launcher import BasicLauncher

    def breaks(*_: Any, **__: Any) -> None:
        raise OSError("the cluster is gone")

    monkeypatch.setattr(BasicLauncher, "launch", breaks)
    with pytest.raises(UserError, match="2 of 2 jobs of the sweep failed:\n.*OSError: the cluster is gone"):
        run_sweep(lambda config: 1.0, "seed=1,2")


def test_interrupted_sweep_reports_what_is_done(run_sweep: RunSweep, tmp_path: Any) -> None:
    def interrupted(config: DictConfig) -> float:
        if config.seed == 2:
            raise KeyboardInterrupt
        return 1.0

    with pytest.raises(KeyboardInterrupt):
        run_sweep(interrupted, "seed=1,2,3")
    from project.sweep import record

    (path,) = tmp_path.glob("*/*/results.csv")
    assert [row.state for row in rows_of(record.read(path.parent))] == ["finished", "interrupted", "waiting"]


@pytest.mark.slow
def test_interrupted_sweep_goes_on_with_the_jobs_that_have_not_finished(run_sweep: RunSweep) -> None:
    ran: list[tuple[int, bool]] = []

    def run_job(config: DictConfig) -> float:
        ran.append((config.seed, config.resume is not None))
        if len(ran) == 2:
            raise KeyboardInterrupt
        return float(config.seed)

    with pytest.raises(KeyboardInterrupt):
        run_sweep(run_job, "seed=1,2,3", "optimizer.lr=0.5", "+hydra.job.env_set.A=b")
    folder = newest_sweep()
    arguments = ["train", f"resume='{folder}'", "hydra.verbose=false"]
    go_on_with_sweep(arguments)
    assert arguments[1] == "--multirun"
    sweep = run_sweep(run_job, *arguments[2:])
    assert sweep.folder == folder
    # The second job has a folder, from which it goes on; the third had none yet.
    assert ran == [(1, False), (2, False), (2, True), (3, False)]
    assert [(row.state, row.objectives) for row in rows_of(sweep)] == [("finished", (float(n),)) for n in (1, 2, 3)]
    assert "optimizer.lr=0.5" in sweep.fixed
    assert "+hydra.job.env_set.A=b" in sweep.typed

    go_on_with_sweep(arguments := ["train", f"resume={folder}"])
    assert len(rows_of(run_sweep(run_job, *arguments[2:]))) == 3
    assert len(ran) == 4


@pytest.mark.slow
def test_sweep_goes_on_as_it_began_and_not_while_it_runs(run_sweep: RunSweep) -> None:
    sweep = run_sweep(lambda config: 1.0, "seed=1,2")
    with pytest.raises(UserError, match="optimizer.lr=1 can't be: the sweep in .* goes on as it began"):
        go_on_with_sweep(["train", f"resume={sweep.folder}", "optimizer.lr=1"])
    go_on_with_sweep(arguments := ["train", f"resume={sweep.folder}"])
    with recorded(sweep.jobs[1].folder), pytest.raises(UserError, match="seed=2 is running: wait for its end"):
        run_sweep(lambda config: 1.0, *arguments[2:])
    unchanged = ["train", "resume=outputs/a_run"]
    go_on_with_sweep(unchanged)
    assert unchanged == ["train", "resume=outputs/a_run"]


def newest_sweep() -> Path:
    return max(Path.cwd().glob("*/*/sweep.json"), key=lambda path: path.stat().st_mtime).parent


def test_sweep_that_monitors_nothing_has_results_and_no_best(run_sweep: RunSweep) -> None:
    sweep = run_sweep(lambda config: 1.0, "seed=1,2", "monitor=null")
    assert [row.state for row in rows_of(sweep)] == ["finished"] * 2
    assert "val/accuracy" in (sweep.folder / "results.csv").read_text()
    assert not (sweep.folder / "best.yaml").exists()


def test_folder_of_another_sweep_is_refused(run_sweep: RunSweep) -> None:
    sweep = run_sweep(lambda config: 1.0, "seed=1,2")
    with pytest.raises(UserError, match="holds a sweep already"):
        run_sweep(lambda config: 1.0, "seed=1,2", f"hydra.sweep.dir={sweep.folder}")


def test_launcher_that_is_not_installed_is_told(run_sweep: RunSweep, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    missing = "hydra_plugins.hydra_ray_launcher"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == missing else find_spec(name))
    monkeypatch.delitem(Plugins.instance().class_name_to_class, "hydra_plugins.own.RayLauncher", raising=False)
    with pytest.raises(UserError, match=r'hydra/launcher=ray needs .*pip install "project\[ray\]"'):
        run_sweep(lambda config: 1.0, "seed=1,2", "hydra/launcher=ray")


def test_a_sweep_that_lost_its_record_is_told(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "config.yaml").touch()
    with pytest.raises(UserError, match=r"holds runs, but no sweep.json, .*: type resume=.*/0 to go on with one run"):
        go_on_with_sweep(["train", f"resume={tmp_path}"])
