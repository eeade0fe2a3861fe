"""What configs learn from the data before a run."""

from typing import Any

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from project.config.composition import explain, register_resolvers
from project.data import DataModule

LOOKS: list[int] = []


class Counted(DataModule):
    """Counts how often its files are looked at."""

    def __init__(self, step: int, num_classes: int | None = None) -> None:
        super().__init__()
        self.step = step

    def facts(self) -> dict[str, Any]:
        LOOKS.append(self.step)
        return {"num_classes": 2 * self.step}


def node(**values: Any) -> dict[str, Any]:
    register_resolvers()
    own = {"_target_": f"{__name__}.Counted", "num_classes": "${fact:num_classes}"}
    resolved: dict[str, Any] = OmegaConf.to_container(OmegaConf.create({"data": own | values}), resolve=True)["data"]  # type: ignore[index,call-overload,assignment]
    return resolved


def test_files_are_looked_at_once_for_the_same_config() -> None:
    LOOKS.clear()
    for _ in range(2):
        assert node(step=3)["num_classes"] == 6
    assert node(step=4)["num_classes"] == 8
    assert LOOKS == [3, 4]


def test_data_without_facts_are_told_to_state_them() -> None:
    with pytest.raises(OmegaConfBaseException) as caught:
        node(_target_="project.data.DataModule", num_classes="${fact:classes}")
    assert explain(caught.value, "train") == (
        "project.data.DataModule has no fact classes, which its config asks for: give the key a value, or the class a "
        "method facts"
    )
