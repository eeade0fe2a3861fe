"""Objects from config nodes, and what is wrong with a node in a sentence."""

from pathlib import Path
from typing import Any

import pytest
import torch

from project.config.build import accepted_arguments, build, build_all, locate
from project.errors import UserError

MODULE = """
class Boom(Exception): ...
class Fails:
    def __init__(self): raise Boom("as it came")
class Refuses:
    def __init__(self, size): raise ValueError(f"size={size} is too small: type more")
class Net:
    def __init__(self, lr, width=8, depth=2): ...
class Deep(Net):
    def __init__(self, **options): super().__init__(0.1, **options)
class Bare: ...
class Wrong:
    def __init__(self, width): int(base=3, x=width)
class Holds:
    def __init__(self, net=None): ...
class Outer:
    @classmethod
    def make(cls, width): return cls()
"""


@pytest.fixture(autouse=True)
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_for_build.py").write_text(MODULE)
    (tmp_path / "broken_for_build.py").write_text("import no_such_package_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)


def test_an_object_is_built_from_its_node_and_what_is_added() -> None:
    config = {"a": {"b": {"_target_": "torch.nn.Linear", "in_features": 2}}}
    layer = build(config, "a.b", out_features=3)
    assert isinstance(layer, torch.nn.Linear)
    assert layer.weight.shape == (3, 2)
    assert config == {"a": {"b": {"_target_": "torch.nn.Linear", "in_features": 2}}}


def test_what_is_built_gets_plain_lists_and_dicts() -> None:
    made = build({"d": {"_target_": "builtins.dict", "betas": [0.9], "more": {"x": [1]}}}, "d")
    assert made == {"betas": [0.9], "more": {"x": [1]}}
    assert type(made["betas"]) is list
    assert type(made["more"]) is dict


@pytest.mark.parametrize(
    ("node", "text"),
    [
        (
            {"_target_": "torch.nn.Linear", "widht": 1},
            "takes no widht, but in_features, out_features, bias, device, dtype: type",
        ),
        ({"_target_": "torch.nn.Linea"}, "Error loc|Linea"),
        ({"_target_": "no_such_package_at_all.X"}, "no_such_package_at_all"),
        ({"_target_": "mine_for_build.Refuses", "size": 1}, "size=1 is too small: type more"),
    ],
    ids=["argument", "name", "package", "value"],
)
def test_a_node_that_cant_be_built_is_told_with_its_key_and_class(node: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text) as info:
        build({"model": {"net": node}}, "model.net")
    assert str(info.value).startswith(f"model.net: {node['_target_']} can't be built: ")
    assert "\n" not in str(info.value)


@pytest.mark.parametrize(
    ("node", "told"),
    [
        ("Net()", "it needs lr: type +thing.lr=VALUE"),
        ("Net(lr=1, widths=3)", "it takes no widths: did you mean +thing.width?"),
        ("Net(lr=1, width=2, widths=3)", "it takes no widths: did you mean thing.width?"),
        (
            "Net(lr=1, momentum=3)",
            "it takes no momentum, but lr, width, depth: type one of these, or leave thing.momentum out",
        ),
        ("Deep(widths=3)", "it takes no widths: did you mean +thing.width?"),
        ("Bare(width=3)", "it takes no width, nor any other argument: leave thing.width out"),
        ("Wrong(width=3)", "'x' is an invalid keyword argument for int() (HYDRA_FULL_ERROR=1 shows where)"),
    ],
)
def test_of_a_wrong_argument_it_is_told_what_to_type(node: str, told: str) -> None:
    name, _, given = node.partition("(")
    config = {"thing": {"_target_": f"mine_for_build.{name}", **eval(f"dict({given}")}}
    with pytest.raises(UserError) as info:
        build(config, "thing")
    said = str(info.value)
    assert said.startswith(f"thing: mine_for_build.{name} can't be built: ")
    assert told.split(" (")[0].removeprefix("'x' ") in said


def test_a_wrong_argument_of_an_inner_node_is_told_with_its_own_key() -> None:
    inner = {"_target_": "mine_for_build.Net", "lr": 1, "widht": 2}
    with pytest.raises(
        UserError, match=r"^thing\.net: mine_for_build\.Net can't .*: did you mean \+thing\.net\.width\?$"
    ):
        build({"thing": {"_target_": "mine_for_build.Holds", "net": inner}}, "thing")


@pytest.mark.parametrize(
    ("key", "target", "told"),
    [
        (
            "model",
            "torch.nn.Linear",
            "inherits from lightning.LightningModule; a net goes into a model: type model.net._",
        ),
        (
            "data",
            "mine_for_build.Bare",
            "data._target_=mine_for_build.Bare is no LightningDataModule: type a class that",
        ),
        ("model", "project.data.DigitsDataModule", "is no LightningModule"),
    ],
)
def test_a_model_or_data_that_lightning_cant_train_are_refused_before_they_are_built(
    key: str, target: str, told: str
) -> None:
    with pytest.raises(UserError) as info:
        build({key: {"_target_": target, "nothing_takes_it": 1}}, key)
    assert told in str(info.value)


def test_what_a_function_gives_may_be_a_model() -> None:
    assert build({"model": {"_target_": "mine_for_build.Outer.make", "width": 3}}, "model")


def test_any_other_error_of_a_class_comes_as_it_was() -> None:
    with pytest.raises(Exception, match="^as it came$") as info:
        build({"thing": {"_target_": "mine_for_build.Fails"}}, "thing")
    assert type(info.value).__name__ == "Boom"
    assert info.traceback[-1].path.name == "mine_for_build.py"  # type: ignore[union-attr]


@pytest.mark.parametrize("config", [{}, {"callbacks": None}, {"callbacks": {}}])
def test_a_group_of_nothing_builds_nothing(config: dict[str, Any]) -> None:
    assert build_all(config, "callbacks") == []


def test_a_group_builds_its_nodes_in_order_without_those_that_were_taken_out() -> None:
    config = {"things": {"b": {"_target_": "builtins.dict", "x": 1}, "gone": None, "a": {"_target_": "builtins.list"}}}
    assert build_all(config, "things") == [{"x": 1}, []]


def test_a_class_is_found_by_its_path() -> None:
    assert locate("torch.nn.Linear", "model") is torch.nn.Linear


def test_a_class_method_is_found_by_its_path() -> None:
    made = locate("mine_for_build.Outer.make", "model")
    assert made.__qualname__ == "Outer.make"


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("Linear", "model._target_=Linear names no module: type the full path"),
        ("", "model._target_= names no module: type the full path"),
        ("torch.nn.Linaer", "torch.nn has no Linaer: did you mean Linear?"),
        ("torch.nm.Linear", "there is no module torch.nm: type a path that python can import"),
        ("broken_for_build.Model", "there is no module no_such_package_at_all"),
    ],
)
def test_a_class_that_cant_be_found_is_told_with_the_nearest(target: str, text: str) -> None:
    with pytest.raises(UserError) as info:
        locate(target, "model")
    assert text in str(info.value)


def test_accepted_arguments_are_the_names_or_none_for_any() -> None:
    def some(a: int, *, b: int = 1) -> None: ...
    def any_(a: int, **more: int) -> None: ...

    assert accepted_arguments(some) == {"a", "b"}
    assert accepted_arguments(any_) is None
