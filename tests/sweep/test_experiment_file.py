"""The best run of a sweep, as an experiment file."""

from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from project.config.composition import config_folder, register_resolvers, take_experiment_file
from project.errors import UserError
from project.sweep.experiment_file import experiment, write_experiment
from project.sweep.results import rows_of
from sweep.folders import make_sweep, write_run


@pytest.mark.parametrize(
    "typed",
    [
        ["optimizer.lr=0.1", "seed=3"],
        ["experiment=none", "optimizer=sgd", "optimizer.lr=1e-05", "data.batch_size=32"],
        ["model/net=residual_cnn", "callbacks=none", "logger=none", "trainer/strategy=ddp"],
        ["+trainer.min_epochs=1", "++model.extra=[1,{a: 'b c'}]", "scheduler=none"],
        ["sweep=optuna", "sweep.n_trials=3", "optimizer.lr=0.3"],
    ],
)
def test_experiment_composes_to_what_was_typed(tmp_path: Path, typed: list[str]) -> None:
    path = tmp_path / "best.yaml"
    path.write_text(experiment(typed, "digits_mlp", "a comment"))
    arguments = ["train", f"experiment={path}"]
    take_experiment_file(arguments)
    GlobalHydra.instance().clear()
    register_resolvers()
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        expected = compose("train", typed)
        found = compose("train", arguments[1:])
    del expected.sweep, found.sweep
    assert OmegaConf.to_container(found) == OmegaConf.to_container(expected)


def test_experiment_of_a_file_elsewhere_is_taken_up(tmp_path: Path) -> None:
    first = tmp_path / "first.yaml"
    first.write_text(experiment(["optimizer=sgd", "seed=1", "optimizer.lr=0.1"], "my_cnn", ""))
    second = experiment(["optimizer=adamw", "seed=2"], str(first), "")
    expected = experiment(["optimizer=adamw", "seed=2", "optimizer.lr=0.1"], "my_cnn", "")
    assert yaml.safe_load(second) == yaml.safe_load(expected)


def test_what_a_file_can_not_say_stands_in_a_comment() -> None:
    assert "type it too: ~scheduler" in experiment(["~scheduler"], None, "")


def test_missing_experiment_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="experiment=.*none.yaml can't be read"):
        take_experiment_file(["train", f"experiment={tmp_path}/none.yaml"])


def test_the_best_is_written_as_it_was_typed_with_the_plus_of_what_was_added(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, {"+model.lr": "0.1", "+scheduler@model.second": "one_cycle"})
    write_run(sweep.jobs[0].folder, metrics={"val/loss": 0.5}, objective=0.5)
    text = write_experiment(sweep, rows_of(sweep)[0]).read_text()
    assert yaml.safe_load(text)["model"] == {"lr": 0.1}
    assert "type it too: +scheduler@model.second=one_cycle" in text
