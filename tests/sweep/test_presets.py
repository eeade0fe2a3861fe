"""Every preset of a sweep composes, and what it names takes its arguments."""

from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.types import HydraContext
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from project.config.composition import config_folder, register_resolvers
from project.sweep.plugins import register_plugins
from project.sweep.space import Space
from project.sweep.study import build_sampler

optuna = pytest.importorskip("optuna")


def composed(*overrides: str) -> DictConfig:
    register_resolvers()
    register_plugins()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        return compose("train", list(overrides), return_hydra_config=True)


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (config_folder() / group).glob("*.yaml"))


@pytest.mark.parametrize(
    ("sampler", "pruner"),
    [
        (sampler, options("sweep/pruner")[number % len(options("sweep/pruner"))])
        for number, sampler in enumerate(options("sweep/sampler"))
    ],
)
def test_samplers_and_pruners_are_optunas(sampler: str, pruner: str) -> None:
    if sampler == "cma_es":
        pytest.importorskip("cmaes")
    config = composed("sweep=optuna", f"sweep/sampler={sampler}", f"sweep/pruner={pruner}")
    settings: Any = OmegaConf.to_container(config.sweep, resolve=True)
    space: Space = {"lr": optuna.distributions.CategoricalDistribution([1, 2])}
    assert isinstance(build_sampler(settings["sampler"], space, 0), optuna.samplers.BaseSampler)
    assert isinstance(instantiate(config.sweep.pruner), optuna.pruners.BasePruner | None)


@pytest.mark.parametrize("launcher", options("hydra/launcher"))
def test_launcher_takes_its_config(launcher: str) -> None:
    pytest.importorskip(f"hydra_plugins.hydra_{launcher.partition('_')[0]}_launcher")
    config = composed(f"hydra/launcher={launcher}", "trainer.devices=2", "hydra.sweep.dir=here")
    context = HydraContext(config_loader=Any, callbacks=Any)  # type: ignore[arg-type]
    found = Plugins.instance().instantiate_launcher(hydra_context=context, task_function=print, config=config)
    assert type(found).__name__.lower().startswith(launcher.rpartition("_")[2])


def test_search_needs_no_flag_for_several_jobs() -> None:
    assert composed("sweep=optuna").hydra.mode.name == "MULTIRUN"
    assert composed().hydra.mode is None
