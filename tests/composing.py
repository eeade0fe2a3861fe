"""Configs as the commands compose them."""

from collections.abc import Callable

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from project.config.composition import config_folder, register_resolvers

Compose = Callable[..., DictConfig]


def compose_config(*overrides: str, name: str = "train") -> DictConfig:
    register_resolvers()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        return hydra_compose(name, overrides=list(overrides))
