"""What the jobs of a sweep run with and are called."""

from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

from project.errors import UserError
from project.sweep.jobs import Job, all_combinations, name_of, short_keys


def parse(*lines: str) -> list[Override]:
    return OverridesParser.create().parse_overrides(list(lines))


@pytest.mark.parametrize(
    ("parameters", "name"),
    [
        ({"optimizer.lr": "0.1", "seed": "2"}, "lr=0.1,seed=2"),
        ({"optimizer.lr": "0.012345678"}, "lr=0.01235"),
        ({"model/net": "mlp", "+data.extra": "x"}, "net=mlp,extra=x"),
        ({"data.seed": "1", "seed": "2"}, "data.seed=1,seed=2"),
        ({}, ""),
    ],
)
def test_job_is_named_after_what_varies(parameters: dict[str, str], name: str) -> None:
    assert name_of(parameters) == name


def test_keys_are_shortened_as_far_as_they_stay_different() -> None:
    assert short_keys(["a.x.lr", "b.x.lr", "c.width"]) == {"a.x.lr": "a.x.lr", "b.x.lr": "b.x.lr", "c.width": "width"}


def test_folders_of_jobs_differ_even_where_names_do_not(tmp_path: Path) -> None:
    folders = {Job.of(number, {"lr": "0.1"}, tmp_path).folder for number in range(3)}
    assert len(folders) == 3
    assert all(folder.parent == tmp_path for folder in folders)


def test_overrides_of_a_job_can_be_read_back_whole(tmp_path: Path) -> None:
    folder = tmp_path / "it's a, folder=1"
    job = Job.of(3, {"model.text": "'a,b'"}, folder)
    read = {o.key_or_group: o.value() for o in parse(*job.overrides(["trainer.devices=2"], {"trial": "3"}))}
    assert read["trainer.devices"] == 2
    assert read["model.text"] == "a,b"
    assert read["hydra.sweep.dir"] == str(folder)
    assert read["hydra.sweep.subdir"] == job.folder.name
    assert read["hydra.sweeper.job.varied"] == ["model.text"]
    assert read["hydra.sweeper.job.trial"] == 3


def test_grid_has_every_combination_and_the_last_changes_fastest() -> None:
    grid = all_combinations(parse("a=1,2", "b=range(0,2)", "c=choice(x,y)"))
    assert len(grid) == 8
    assert grid[:3] == [{"a": "1", "b": "0", "c": "x"}, {"a": "1", "b": "0", "c": "y"}, {"a": "1", "b": "1", "c": "x"}]


def test_interval_in_a_grid_is_told_what_to_type() -> None:
    with pytest.raises(UserError, match=r"optimizer.lr=interval\(0,1\).*type values.*sweep=optuna"):
        all_combinations(parse("optimizer.lr=interval(0,1)"))
