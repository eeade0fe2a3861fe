"""What may be typed as a strategy."""

from typing import Any

import pytest
from lightning.pytorch.strategies import Strategy, StrategyRegistry
from omegaconf import OmegaConf

from project.config.build import locate
from project.config.composition import config_folder
from project.config.strategy_names import ALIASES, resolve
from project.errors import UserError

FILES = {path.stem: path for path in sorted((config_folder() / "trainer" / "strategy").glob("*.yaml"))}


def of_file(name: str) -> Any:
    return OmegaConf.to_container(OmegaConf.load(FILES[name]))["strategy"]  # type: ignore[call-overload, index]


@pytest.mark.parametrize("name", FILES)
def test_the_name_of_a_config_file_means_what_stands_in_it(name: str) -> None:
    assert resolve(name) == of_file(name)


@pytest.mark.parametrize("name", FILES)
def test_every_config_file_holds_a_strategy_that_there_is(name: str) -> None:
    strategy = of_file(name)
    if isinstance(strategy, str):
        assert strategy == "auto" or strategy in StrategyRegistry.available_strategies()
    else:
        assert issubclass(locate(strategy["_target_"], "trainer.strategy"), Strategy)


@pytest.mark.parametrize("alias", [alias for alias, name in ALIASES.items() if name in FILES])
def test_a_name_that_lightnings_users_know_means_our_file(alias: str) -> None:
    assert resolve(alias) == of_file(ALIASES[alias])


@pytest.mark.parametrize("strategy", ["ddp_notebook", {"_target_": "mine.Strategy"}])
def test_a_name_of_lightnings_alone_and_a_class_stay_as_they_are(strategy: Any) -> None:
    assert resolve(strategy) == strategy


@pytest.mark.parametrize(
    ("name", "advice"),
    [("dpd", "dp"), ("ddp_find_unused_parameter_true", "ddp_find_unused_parameters_true"), ("magic", "auto")],
)
def test_an_unknown_name_is_refused_with_the_nearest(name: str, advice: str) -> None:
    with pytest.raises(UserError, match=f"^trainer.strategy={name} is not known .*: type trainer.strategy={advice}$"):
        resolve(name)
