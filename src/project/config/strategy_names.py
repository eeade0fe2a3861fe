"""What ``trainer.strategy`` names: a file of ``conf/trainer/strategy``, or a strategy of Lightning's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from project.config.composition import config_folder
from project.errors import UserError, nearest

# Names that Lightning's users know, for files of ours.
ALIASES = {
    "ddp_find_unused_parameters_true": "ddp_find_unused",
    "ddp_find_unused_parameters_false": "ddp",
    "data_parallel": "dp",
    "deepspeed_stage_2": "deepspeed",
}


def resolve(strategy: Any) -> Any:
    """The strategy as its config file says, where a plain name was typed: ``trainer.strategy=dp``.

    A dict (``trainer/strategy=dp``) comes back as it is, and so does a name that only Lightning knows.

    Raises:
        UserError: nobody knows the name.
    """
    if not isinstance(strategy, str):
        return strategy
    files = {path.stem: path for path in (config_folder() / "trainer" / "strategy").glob("*.yaml")}
    name = ALIASES.get(strategy, strategy)
    if name in files:
        return _read(files[name])
    from lightning.pytorch.strategies import StrategyRegistry  # takes seconds, and is rarely needed

    known = {*files, *StrategyRegistry.available_strategies()}
    if strategy in known and strategy.startswith("deepspeed_"):  # a stage and offloading, on top of our file
        return _read(files["deepspeed"]) | StrategyRegistry[strategy]["init_params"]
    if strategy not in known:
        match = nearest(strategy, sorted(known)) or "auto"
        raise UserError(
            f"trainer.strategy={strategy} is not known ({', '.join(sorted(files))}, or a name of Lightning's): type "
            f"trainer.strategy={match}"
        )
    return strategy


def _read(path: Path) -> Any:
    return OmegaConf.to_container(OmegaConf.load(path), resolve=True)["strategy"]  # type: ignore[call-overload, index]
