"""Grids: every combination, whatever becomes of one."""

from collections.abc import Callable
from typing import Any

import pytest
from hydra.errors import MissingConfigException
from omegaconf import DictConfig

from project.errors import UserError
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
    assert "sweep: 6 of 6 done, 2 failed; best val/accuracy 3 (seed=3,lr=0.1)" in out


def test_every_job_has_a_folder_named_after_what_varies(run_sweep: RunSweep) -> None:
    sweep = run_sweep(lambda config: 1.0, "optimizer.lr=0.1,0.2", "seed=1,2", "trainer.max_epochs=3")
    names = [job.folder.name for job in sweep.jobs]
    assert names == ["0_lr=0.1,seed=1", "1_lr=0.1,seed=2", "2_lr=0.2,seed=1", "3_lr=0.2,seed=2"]
    assert all((job.folder / "metrics.json").exists() for job in sweep.jobs)


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


def test_what_does_not_compose_is_refused_before_any_job_runs(run_sweep: RunSweep) -> None:
    def never(config: DictConfig) -> float:
        raise AssertionError("a job ran")

    with pytest.raises(MissingConfigException, match="optimizer/nothing"):
        run_sweep(never, "optimizer=adamw,nothing")


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


def test_sweep_that_monitors_nothing_has_results_and_no_best(run_sweep: RunSweep) -> None:
    sweep = run_sweep(lambda config: 1.0, "seed=1,2", "monitor=null")
    assert [row.state for row in rows_of(sweep)] == ["finished"] * 2
    assert "val/accuracy" in (sweep.folder / "results.csv").read_text()
    assert not (sweep.folder / "best.yaml").exists()


def test_folder_of_another_sweep_is_refused(run_sweep: RunSweep) -> None:
    sweep = run_sweep(lambda config: 1.0, "seed=1,2")
    with pytest.raises(UserError, match="holds a sweep already"):
        run_sweep(lambda config: 1.0, "seed=1,2", f"hydra.sweep.dir={sweep.folder}")


def test_launcher_that_is_not_installed_is_told(run_sweep: RunSweep) -> None:
    import importlib.util

    if importlib.util.find_spec("hydra_plugins.hydra_ray_launcher"):
        pytest.skip("the Ray launcher is installed")
    with pytest.raises(UserError, match=r'hydra/launcher=ray needs .*pip install "project\[ray\]"'):
        run_sweep(lambda config: 1.0, "seed=1,2", "hydra/launcher=ray")
