"""Hydra's sweep overrides as what Optuna chooses from."""

from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from project.errors import UserError
from project.sweep.space import grid_of, space_of, value_as_typed

optuna = pytest.importorskip("optuna")
Categorical = optuna.distributions.CategoricalDistribution
Float = optuna.distributions.FloatDistribution
Int = optuna.distributions.IntDistribution


def space(*lines: str) -> dict[str, Any]:
    return space_of(OverridesParser.create().parse_overrides(list(lines)))


@pytest.mark.parametrize(
    ("text", "distribution"),
    [
        ("0.1,0.01", Categorical(["0.1", "0.01"])),
        ("choice(adamw,sgd)", Categorical(["adamw", "sgd"])),
        ("choice('a b',true)", Categorical([r"a\ b", "True"])),
        ("1,null", Categorical(["1", "null"])),
        ("range(1,10)", Int(1, 9)),
        ("range(16,65,16)", Int(16, 64, step=16)),
        ("range(10,0,-2)", Int(2, 10, step=2)),
        ("range(0.0,0.5,0.1)", Float(0.0, 0.4, step=0.1)),
        ("tag(log,range(1,1000))", Int(1, 999, log=True)),
        ("interval(0,1)", Float(0.0, 1.0)),
        ("int(interval(1,8))", Int(1, 8)),
        ("tag(log,interval(1e-4,1e-1))", Float(1e-4, 1e-1, log=True)),
        ("tag(log,int(interval(8,512)))", Int(8, 512, log=True)),
    ],
)
def test_sweep_override_becomes_a_distribution(text: str, distribution: Any) -> None:
    assert space(f"key={text}") == {"key": distribution}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("interval(1,0)", "type another range or interval"),
        ("tag(log,interval(0,1))", "type another range or interval"),
        ("range(3,3)", "empty"),
        ("tag(lin,interval(0,1))", r"the tag lin is not known: type tag\(log"),
    ],
)
def test_what_can_not_be_searched_is_refused(text: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        space(f"key={text}")


@pytest.mark.parametrize("text", ["a,b", "range(1,4)", "range(0.0,0.3,0.1)"])
def test_values_of_a_grid_are_those_that_hydra_would_sweep(text: str) -> None:
    (override,) = OverridesParser.create().parse_overrides([f"key={text}"])
    typed = [value_as_typed(value) for value in grid_of(space(f"key={text}"))["key"]]
    assert typed == list(override.sweep_string_iterator())


def test_grid_over_an_interval_is_refused() -> None:
    with pytest.raises(UserError, match="key is an interval"):
        grid_of(space("key=interval(0,1)"))


@pytest.mark.parametrize("value", [1e-05, 0.1, 12, "adamw"])
def test_chosen_value_survives_the_command_line(value: Any) -> None:
    (override,) = OverridesParser.create().parse_overrides([f"key={value_as_typed(value)}"])
    assert override.value() == value
