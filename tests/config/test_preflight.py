"""What is refused before anything starts."""

import importlib.util
import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from project.config import preflight
from project.errors import UserError

Compose = Callable[..., DictConfig]

# key: values that can be, values that can't
VALUES: dict[str, tuple[list[str], list[str]]] = {
    "seed": (["0", "4294967295", "null"], ["-1", "4294967296", "1.5", "true", "x"]),
    "mode": (["min", "max"], ["mean", "null"]),
    "monitor": (["val/loss", "null"], ["3", "[a]"]),
    "test": (["true", "false"], ["1", "null", "x"]),
    "format": (["csv", "parquet"], ["json", "null"]),
    "quantize": (["int8_dynamic", "null"], ["int5", "8", "[int8_dynamic]"]),
    "callbacks.quantize.kind": (["int8_weight_only"], ["int5", "null"]),
    "callbacks.pruning.amount": (["0.5"], ["0", "1", "2", "abc", "null"]),
    "callbacks.pruning.begin": (["0", "0.5", "1"], ["-0.1", "2", "abc"]),
    "callbacks.pruning.end": (["0.5", "1"], ["0", "2", "abc"]),
    "callbacks.pruning.rounds": (["1", "10"], ["0", "1.5", "abc"]),
    "model.channels_last": (["true", "false"], ["maybe", "1", "null"]),
    "data.batch_size": (["1", "64"], ["0", "-1", "64.0", "true", "null", "x"]),
    "data.num_workers": (["0", "4"], ["-1", "1.5", "null"]),
    "optimizer.lr": (["0", "0.1", "1e-3"], ["-0.1", "nan", "x", "null"]),
    "launch.threads_per_rank": (["auto", "1"], ["0", "x", "null", "1.5"]),
    "launch.timeout_s": (["60", "0.5"], ["0", "-1", "x", "null"]),
    "launch.host_timeout_s": (["0.5"], ["0", "x", "null"]),
    "launch.keep_freed_memory": (["true", "false"], ["1", "x", "null"]),
    "launch.hang_timeout_s": (["60", "0.5", "null"], ["0", "-1", "x"]),
    "callbacks.last.min_gap_s": (["1", "0", "null"], ["-1", "x", "inf"]),
    "launch.grace_s": (["60", "0.5"], ["0", "-1", "x", "null"]),
    "launch.max_restarts": (["0", "3"], ["-1", "1.5", "x", "null"]),
    "launch.trusted_targets": (["[]", "[my_lab, torch.nn]"], ["my_lab", "[1]", "null"]),
    "trainer.num_nodes": (["1", "2"], ["0", "x", "null"]),
    "trainer.max_epochs": (["1", "-1", "null"], ["0", "-2", "1.5"]),
    "trainer.max_steps": (["1", "-1"], ["0", "-2", "null", "1.5"]),
    "trainer.accumulate_grad_batches": (["1", "8"], ["0", "1.5", "null"]),
    "trainer.gradient_clip_val": (["null", "0", "0.5"], ["-1", "x"]),
    "trainer.gradient_clip_algorithm": (["norm", "value"], ["l2", "null"]),
    "trainer.check_val_every_n_epoch": (["1", "null"], ["0", "1.5"]),
    "trainer.val_check_interval": (["null", "0.5", "10", "1.0"], ["0", "1.5", "-1", "true"]),
    "trainer.limit_train_batches": (["null", "0", "0.5", "10", "1.0"], ["1.5", "-1", "true", "x"]),
    "trainer.limit_val_batches": (["null", "0", "0.5", "10"], ["1.5", "-1", "true"]),
    "trainer.limit_test_batches": (["null", "0", "0.5", "10"], ["1.5", "-1", "true"]),
    "trainer.limit_predict_batches": (["null", "0", "0.5", "10"], ["1.5", "-1", "true"]),
    "trainer.num_sanity_val_steps": (["0", "1", "-1"], ["-2", "1.5", "null"]),
    "trainer.log_every_n_steps": (["1", "50"], ["0", "1.5", "null"]),
    "benchmark.strategies": (["[ddp]", "[dp,fsdp]"], ["ddp", "[]", "[2]", "null"]),
    "benchmark.parts": (["[tiny]", "[start,config]"], ["tiny", "[]", "[all]", "null"]),
    "benchmark.devices": (["2", "[1,2,4]"], ["0", "[]", "[0,2]", "null"]),
    "benchmark.step_ms": (["5", "[0.5,20]", "null"], ["0", "[]", "[-1]", "x"]),
    "benchmark.repeats": (["1"], ["0", "1.5", "null"]),
    "benchmark.warmup_steps": (["1"], ["0", "1.5", "null"]),
    "benchmark.epochs": (["1"], ["0", "1.5", "null"]),
    "benchmark.steps": (["2"], ["1", "1.5", "null"]),
    "benchmark.start_devices": (["2"], ["1", "1.5", "null"]),
    "benchmark.tracking_s": (["0.1"], ["0", "x", "null"]),
    "benchmark.measured_s": (["0.1"], ["0", "x", "null"]),
    "benchmark.timeout_s": (["0.1"], ["0", "x", "null"]),
    "benchmark.kinds": (["[weak]", "[strong,weak]"], ["weak", "[]", "[big]", "null"]),
    "benchmark.batch_sizes": (["[]", "[1,16]"], ["1", "[0]", "[x]", "null"]),
    "benchmark.calls": (["1"], ["0", "1.5", "null"]),
    "benchmark.budget_s": (["0.1"], ["0", "x", "null"]),
    "benchmark.min_gain": (["0", "0.03"], ["-0.1", "x", "null"]),
    "benchmark.allow_inexact": (["true"], ["1", "x", "null"]),
}
GOOD = [(key, value) for key, (good, _) in VALUES.items() for value in good]
BAD = [(key, value) for key, (_, bad) in VALUES.items() for value in bad]


@pytest.fixture(scope="module")
def base(compose: Compose) -> dict[str, Any]:
    """The config of a training run; ``format`` and ``split`` are predict's, ``benchmark`` is that of all kinds."""
    of_others = (
        "parts=[tiny]", "measured_s=1", "tracking_s=1", "epochs=1", "start_devices=4", "kinds=[weak]",
        "batch_sizes=[1]", "calls=1",
        "budget_s=1", "min_gain=0.1", "allow_inexact=false",
    )  # fmt: skip
    added = (f"+benchmark.{key}" for key in of_others)
    compression = ("callbacks=pruning", "+callbacks.quantize.kind=int8_dynamic", "+quantize=null")
    return plain(compose("+format=csv", "+split=test", "+benchmark=strategies", *compression, *added))


@pytest.fixture(scope="module")
def typed(compose: Compose) -> Callable[[str], Any]:
    """What Hydra reads a value as: all are composed at once, since each composition takes its time."""
    values = {value for good, bad in VALUES.values() for value in good + bad}
    names = {value: f"v{number}" for number, value in enumerate(sorted(values))}
    composed = plain(compose(*(f"+{name}={value}" for value, name in names.items())))
    return lambda value: composed[names[value]]


@pytest.fixture
def config(base: dict[str, Any]) -> dict[str, Any]:
    return deepcopy(base)


def plain(config: DictConfig) -> dict[str, Any]:
    return OmegaConf.to_container(config, resolve=True)  # type: ignore[return-value]


def put(config: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        config = config[parent]
    assert last in config
    config[last] = value


def test_every_rule_is_tested() -> None:
    assert set(VALUES) == {key for key, _, _ in preflight.RULES}


def test_the_config_as_it_is_passes(config: dict[str, Any]) -> None:
    preflight.check(config)
    preflight.check_batch_size(config, 4)


@pytest.mark.parametrize(("key", "value"), GOOD)
def test_values_that_can_be_pass(config: dict[str, Any], typed: Callable[[str], Any], key: str, value: str) -> None:
    if (key, value) == ("trainer.max_epochs", "-1"):
        config["trainer"]["max_steps"] = 10  # something must end the run
    put(config, key, typed(value))
    preflight.check(config)


@pytest.mark.parametrize(("key", "value"), BAD)
def test_values_that_cant_be_are_refused_with_what_is_allowed(
    config: dict[str, Any], typed: Callable[[str], Any], key: str, value: str
) -> None:
    put(config, key, typed(value))
    allowed = next(text for rule, _, text in preflight.RULES if rule == key)
    message = f"{key}={typed(value)} can't be: type {key}= with {allowed}"
    with pytest.raises(UserError, match=re.escape(message)):
        preflight.check(config)


@pytest.mark.parametrize("key", ["optimizer.lr", "trainer.gradient_clip_val"])
def test_false_is_no_number(config: dict[str, Any], key: str) -> None:
    put(config, key, False)
    with pytest.raises(UserError, match=f"{key}=False can't be"):
        preflight.check(config)


@pytest.mark.parametrize(
    ("key", "value", "advice"),
    [
        ("trainer.accelerator", "cude", "type trainer.accelerator=cuda"),
        ("trainer.precision", "bf16-mix", "type trainer.precision=bf16-mixed"),
        ("trainer.precision", 8, "type one of 32-true"),
        ("split", "tst", "type split=test"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(config: dict[str, Any], key: str, value: Any, advice: str) -> None:
    put(config, key, value)
    with pytest.raises(UserError, match=re.escape(f"{key}={value} is not known")) as info:
        preflight.check(config)
    assert advice in str(info.value)


@pytest.mark.parametrize("precision", [32, "32", "16-mixed"])
def test_precision_may_be_typed_as_a_number(config: dict[str, Any], precision: Any) -> None:
    put(config, "trainer.precision", precision)
    preflight.check(config)


@pytest.mark.parametrize("format_", [True, False])
def test_the_train_split_is_there_for_predictions_only(config: dict[str, Any], format_: bool) -> None:
    put(config, "split", "train")
    if format_:
        preflight.check(config)
    else:
        del config["format"]
        with pytest.raises(UserError, match=r"split=train is not known \(val, test\)"):
            preflight.check(config)


@pytest.mark.parametrize(("key", "value"), [("max_steps", 10), ("max_time", "00:00:10:00")])
def test_a_training_without_end_is_refused(config: dict[str, Any], key: str, value: Any) -> None:
    config["trainer"]["max_epochs"] = -1
    with pytest.raises(UserError, match=r"never ends: type trainer\.max_steps=N or trainer\.max_time"):
        preflight.check(config)
    config["trainer"][key] = value
    preflight.check(config)


@pytest.mark.parametrize(
    ("batch_size", "ranks", "advice"),
    [
        (64, 3, "type data.batch_size=63 or data.batch_size=66"),
        (2, 4, "type data.batch_size=4"),
        (7, 2, "type data.batch_size=6 or data.batch_size=8"),
    ],
)
def test_a_batch_that_ranks_cant_share_is_refused_with_the_nearest_sizes(
    config: dict[str, Any], batch_size: int, ranks: int, advice: str
) -> None:
    config["data"]["batch_size"] = batch_size
    with pytest.raises(UserError) as info:
        preflight.check_batch_size(config, ranks)
    assert str(info.value).endswith(advice)


def test_a_data_module_of_the_users_own_has_its_own_rules_for_batches(config: dict[str, Any]) -> None:
    config["data"] |= {"_target_": "mine.Data", "batch_size": 7}
    preflight.check_batch_size(config, 2)


@pytest.mark.parametrize(("package", "extra"), [("pyarrow", "parquet"), ("optuna", "sweep"), ("torchvision", "vision")])
def test_a_package_that_is_missing_is_named_with_its_extra(
    config: dict[str, Any], package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))
    config["callbacks"]["mine"] = {"_target_": f"{package}.callbacks.Mine"}
    with pytest.raises(UserError) as info:
        preflight.check(config)
    assert str(info.value) == (
        f"callbacks.mine._target_={package}.callbacks.Mine needs the package {package}, which is not installed: "
        f'type pip install "project[{extra}]"'
    )


def test_a_package_that_no_extra_brings_is_named_all_the_same(config: dict[str, Any]) -> None:
    config["model"]["net"]["_target_"] = "no_such_package.Net"
    with pytest.raises(UserError, match=r"model\.net\._target_=.*needs the package no_such_package.*or mend the name"):
        preflight.check(config)


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module with classes of the user's own."""
    (tmp_path / "mine_for_preflight.py").write_text(
        "import lightning as L\n"
        "class Strict(L.LightningModule):\n"
        "    def __init__(self, optimizer, width=1): ...\n"
        "class Open(L.LightningModule):\n"
        "    def __init__(self, **anything): ...\n"
        "class Net:\n"
        "    def __init__(self, num_classes): ...\n"
        "class Data(L.LightningDataModule):\n"
        "    def __init__(self, batch_size=32, num_workers=0, shuffle=False, seed=7, image_shape=(1, 8, 8)): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    ("overrides", "left_out"),
    [
        (
            ["model._target_=mine_for_preflight.Strict"],
            ["model.net", "model.num_classes", "model.scheduler", "model.compile", "model.channels_last"],
        ),
        (
            ["model._target_=mine_for_preflight.Strict", "model.net.width=8", "+model.widht=3", "model.compile=true"],
            ["model.num_classes", "model.scheduler", "model.channels_last"],
        ),
        (
            ["model._target_=mine_for_preflight.Strict", "model/net=residual_cnn"],
            ["model.num_classes", "model.scheduler", "model.compile", "model.channels_last"],
        ),
        (["model._target_=mine_for_preflight.Open"], []),
        (["model.net.width=8"], []),
    ],
    ids=["not_taken", "typed_stay", "typed_group_stays", "takes_any", "class_not_typed"],
)
def test_what_a_class_that_was_put_in_does_not_take_is_left_out(
    compose: Compose, overrides: list[str], left_out: list[str]
) -> None:
    config = plain(compose(*overrides))
    before = deepcopy(config)
    assert sorted(preflight.fit_to_targets(config, overrides)) == sorted(left_out)
    kept = {name for name in before["model"] if f"model.{name}" not in left_out}
    assert config["model"] == {name: before["model"][name] for name in kept}
    assert config["data"] == before["data"]


@pytest.mark.usefixtures("mine")
def test_values_that_win_over_defaults_of_a_class_that_was_put_in_are_told(compose: Compose) -> None:
    overrides = ["data._target_=mine_for_preflight.Data"]
    config = plain(compose(*overrides))
    preflight.fit_to_targets(config, overrides)
    won = preflight.replaced_defaults(config, overrides)
    assert won == {"data.batch_size=64": "data.batch_size=32", "data.shuffle=true": "data.shuffle=false"}
    overrides.append("data.batch_size=64")  # typed: wanted so
    assert preflight.replaced_defaults(config, overrides) == {"data.shuffle=true": "data.shuffle=false"}
    assert preflight.replaced_defaults(config, []) == {}


@pytest.mark.usefixtures("mine")
def test_a_net_that_was_put_in_is_given_what_it_takes(compose: Compose) -> None:
    overrides = ["model.net._target_=mine_for_preflight.Net"]
    config = plain(compose(*overrides))
    preflight.fit_to_targets(config, overrides)
    assert config["model"]["net"].keys() == {"_target_", "num_classes"}


@pytest.mark.usefixtures("mine")
def test_a_class_that_an_experiment_of_conf_puts_in_is_given_what_it_takes(
    compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "faces.yaml").write_text("model: {_target_: mine_for_preflight.Strict}\n")
    monkeypatch.setattr(preflight, "config_folder", lambda: tmp_path)
    config = plain(compose("model._target_=mine_for_preflight.Strict"))  # as the file would
    assert "model.scheduler" in preflight.fit_to_targets(config, ["experiment=faces"])


@pytest.mark.parametrize(
    ("overrides", "group", "kept"),
    [
        (["optimizer._target_=torch.optim.Adagrad"], "optimizer", {"_target_", "lr", "weight_decay"}),
        (["optimizer._target_=torch.optim.Adagrad", "optimizer.betas=[0,0]"], "optimizer",
         {"_target_", "lr", "weight_decay", "betas"}),
        (["scheduler._target_=torch.optim.lr_scheduler.CosineAnnealingLR", "+scheduler.T_max=auto"], "scheduler",
         {"_target_", "T_max", "interval"}),
    ],
    ids=["optimizer", "typed_stays", "schedule"],
)  # fmt: skip
def test_an_optimizer_and_a_schedule_that_were_put_in_are_given_what_they_take(
    compose: Compose, overrides: list[str], group: str, kept: set[str]
) -> None:
    config = plain(compose(*overrides))
    preflight.fit_to_targets(config, overrides)
    assert config[group].keys() == kept
    assert config["model"][group] == config[group]


@pytest.mark.usefixtures("mine")
def test_a_model_that_is_a_net_is_refused_before_anything_starts(compose: Compose) -> None:
    overrides = ["model._target_=torch.nn.Linear"]
    with pytest.raises(
        UserError, match=r"^model\._target_=torch\.nn\.Linear is no LightningModule: .*model\.net\._target_"
    ):
        preflight.fit_to_targets(plain(compose(*overrides)), overrides)


@pytest.mark.parametrize("typed", ["scheduler=warmup_cosine", "scheduler.interval=epoch"])
def test_what_is_typed_for_a_group_that_the_model_does_not_read_is_refused(compose: Compose, typed: str) -> None:
    overrides = ["model._target_=mine_for_preflight.Strict", typed]
    config = plain(compose(*overrides))
    with pytest.raises(UserError, match=r"scheduler.* was typed, but model\._target_=.*Strict takes no scheduler"):
        preflight.fit_to_targets(config, overrides)
    none = plain(compose(overrides[0], "scheduler=none"))
    preflight.fit_to_targets(none, [overrides[0], "scheduler=none"])  # what one gets
    untyped = plain(compose(overrides[0]))
    preflight.fit_to_targets(untyped, overrides[:1])
    assert "scheduler" not in untyped  # so that it is not shown as a hyperparameter either
    assert "optimizer" in untyped


def test_weights_that_are_no_file_are_refused_where_a_training_begins(config: dict[str, Any], tmp_path: Path) -> None:
    config = deepcopy(config)
    config["callbacks"]["finetuning"] = {"weights": str(tmp_path / "none.ckpt")}
    with pytest.raises(UserError, match="none.ckpt is no file: type callbacks.finetuning.weights=published"):
        preflight.check(config)
    preflight.check(config | {"resume": "run"})  # which has weights of its own
    (tmp_path / "none.ckpt").touch()
    preflight.check(config)


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("model.num_classes=2", "the data has 10 classes, and model.num_classes=2: type model.num_classes=10 or leave"),
        ("model.net.num_classes=9", "and model.net.num_classes=9: type model.net.num_classes=10 or leave it out"),
        ("model.num_classes=12", None),
    ],
)
def test_a_model_has_an_output_for_each_class(compose: Compose, typed: str, told: str | None) -> None:
    config: Any = OmegaConf.to_container(compose(typed), resolve=True)
    if told is None:
        preflight.check(config)
    else:
        with pytest.raises(UserError) as info:
            preflight.check(config)
        assert told in str(info.value)
