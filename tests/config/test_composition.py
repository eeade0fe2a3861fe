"""Every config composes, and what Hydra says of a mistake becomes a sentence."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from pictures import folder_of_pictures  # example
from project.config import composition
from project.config.composition import check_choices, check_folders, config_folder, explain, name_after_own_class, slug
from project.errors import UserError

Compose = Callable[..., DictConfig]

NOT_OF_TRAIN = {"hydra", "sweep", "benchmark"}  # read while the command line is, or of another command
COMPLETE = {"experiment", "debug"}  # a whole run per file
OF_IMAGES = "data/augment"  # which not all data have


def options() -> list[tuple[str, str]]:
    """(group, option) of every config file that is chosen in train.yaml's defaults."""
    folder = config_folder()
    paths = sorted(path.relative_to(folder).with_suffix("") for path in folder.glob("*/**/*.yaml"))
    return [(str(p.parent), p.name) for p in paths if p.parts[0] not in NOT_OF_TRAIN]


def sentence_of(compose: Compose, *overrides: str, name: str = "train") -> str:
    with pytest.raises(Exception) as info:
        OmegaConf.to_container(compose(*overrides, name=name), resolve=True, throw_on_missing=True)
    assert isinstance(info.value, Exception)
    text = explain(info.value, name, overrides)
    assert text is not None
    return text


def test_there_are_options_to_compose() -> None:
    assert {("data", "digits"), ("model/net", "mlp"), ("trainer/strategy", "ddp")} <= set(options())


def test_every_optional_group_can_be_left_out_by_none() -> None:
    without = {group for group, option in options() if option == "none"}
    optional = {"scheduler", "callbacks", "logger", "progress", "experiment", "debug", OF_IMAGES}
    assert without == optional


@pytest.fixture(scope="module")
def compose_all(compose: Compose) -> Callable[[int], DictConfig]:
    """A training config with the option at this place of every group: composing each alone would take its time."""

    @functools.cache
    def run(index: int) -> DictConfig:
        chosen = {}
        for group in sorted({group for group, _ in options()} - COMPLETE - {OF_IMAGES}):
            names = [name for g, name in options() if g == group]
            chosen[group] = names[index % len(names)]
        return compose(*(f"{group}={option}" for group, option in chosen.items()))

    return run


@pytest.mark.parametrize(("group", "option"), [pair for pair in options() if pair[0] not in {*COMPLETE, OF_IMAGES}])
def test_every_option_of_every_group_composes_with_the_training_config(
    compose_all: Callable[[int], DictConfig], group: str, option: str
) -> None:
    config = compose_all([name for g, name in options() if g == group].index(option))
    if group == "trainer/strategy":  # lies in the trainer itself
        chosen = OmegaConf.load(config_folder() / group / f"{option}.yaml")
        assert config.trainer.strategy == chosen.strategy  # type: ignore[union-attr]
    elif option == "none" or (group, option) == ("progress", "lightning"):
        assert config[group] is None
    else:
        assert OmegaConf.select(config, group.replace("/", "."))


@pytest.mark.parametrize("option", [option for group, option in options() if group == OF_IMAGES])
def test_every_augmentation_composes_with_image_data(compose: Compose, option: str) -> None:
    assert bool(compose(f"+{OF_IMAGES}={option}").data.augment) == (option != "none")


@pytest.mark.parametrize(("group", "option"), [pair for pair in options() if pair[0] in COMPLETE])
def test_every_experiment_is_complete(compose: Compose, tmp_path: Path, group: str, option: str) -> None:
    own = []
    if option.startswith("image_folder"):  # example
        own = [f"data.folder={folder_of_pictures(tmp_path / 'own', 1)}"]  # example
    config = compose(f"{group}={option}", *own)
    plain: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    names = {"experiment": option, "debug": f"debug_{option}"}
    if option == "none":
        names = {"experiment": "unnamed", "debug": "digits_mlp"}
    assert plain["name"] == names[group]


@pytest.mark.parametrize(("command", "overrides"), [("evaluate", ["ckpt_path=x"]), ("predict", ["ckpt_path=x"])])
def test_the_other_commands_compose_too(compose: Compose, command: str, overrides: list[str]) -> None:
    config = compose(*overrides, name=command)
    assert OmegaConf.to_container(config, resolve=True, throw_on_missing=True)


def test_a_debug_config_wins_over_the_experiment(compose: Compose) -> None:
    config = compose("experiment=digits_mlp", "debug=overfit")
    assert config.scheduler is None
    assert config.trainer.overfit_batches == 2


def test_what_is_typed_wins_over_the_experiment(compose: Compose) -> None:
    config = compose(
        "experiment=digits_mlp", "data=synthetic", "optimizer=sgd", "model/net=residual_cnn", "trainer.max_epochs=2"
    )
    assert config.name == "digits_mlp"
    assert config.data._target_ == "project.data.SyntheticImages"
    assert config.optimizer._target_ == "torch.optim.SGD"
    assert config.model.net._target_ == "project.models.nets.ResidualCNN"
    assert config.trainer.max_epochs == 2


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("optimizer.lrr=1", "optimizer.lrr is not in the config: did you mean optimizer.lr?"),
        ("model.lr=0.1", "model.lr is not in the config: did you mean optimizer.lr?"),
        ("lr=1", "lr is not in the config: did you mean optimizer.lr?"),
        ("max_epoch=8", "max_epoch is not in the config: did you mean trainer.max_epochs?"),
        ("optimiser=sgd", "optimiser is not in the config: did you mean optimizer?"),
        ("modle/net=mlp", "modle/net is not in the config: did you mean model/net?"),
        ("trainer.zzz=1", "trainer.zzz is not in the config, and lightning.Trainer takes no zzz: leave it out"),
        ("zzz=1", "zzz is not in the config: leave it out, or add it to the class that takes it, as in +model.zzz=V"),
        ("data=synthetic data.lengths=9", "data.lengths is not in the config: did you mean data.length?"),
        ("ckpt_path=x", "ckpt_path is not in the config: type resume=FOLDER to go on with a run"),
    ],
)
def test_an_unknown_key_or_group_comes_with_the_nearest(compose: Compose, override: str, text: str) -> None:
    assert text in sentence_of(compose, *override.split())


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        (["model._target_=my_lab.models.MyGPTNet"], "my_gpt_net"),
        (["data._target_=lab.Points"], "points"),
        (["data._target_=lab.Points", "model._target_=lab.line.Line2D"], "line2_d"),
        (["model._target_=lab.Net", "experiment=none"], "net"),
        (["model._target_='lab.Net'", "-c", "job"], "net"),
        (["-m", "model._target_=lab.Net", "seed=1,2"], "net"),
        (["model._target_=lab.Net", "name=mine"], None),
        (["model._target_=lab.Net", "experiment=digits_mlp"], None),
        (["model._target_=lab.Net,lab.Other"], None),
        (["resume=outputs/x", "model._target_=lab.Net"], None),
        (["optimizer.lr=0.1"], None),
    ],
)
def test_a_run_is_named_after_the_class_that_is_put_in(typed: list[str], name: str | None) -> None:
    arguments = ["train", *typed]
    name_after_own_class(arguments)
    assert [text for text in arguments if not text.startswith("name=") or text in typed] == ["train", *typed]
    if name:
        place = arguments.index(f"name={name}")
        assert arguments[place + 1].startswith(("model._target_=", "data._target_="))


@pytest.mark.parametrize(
    ("override", "nearest"), [("~trainer.max_epoch", "trainer.max_epochs"), ("~schedulr", "scheduler")]
)
def test_an_unknown_key_to_delete_comes_with_the_nearest(compose: Compose, override: str, nearest: str) -> None:
    text = sentence_of(compose, override)
    assert f"{override[1:]} is not in the config: did you mean {nearest}?" in text
    assert "To add" not in text


@pytest.mark.parametrize(
    ("override", "advice"),
    [
        ("optimizer=sdg", "type optimizer=sgd"),
        ("model/net=mpl", "type model/net=mlp"),
        ("trainer/strategy=dpd", "type trainer/strategy=d"),
        ("experiment=digits", "type experiment=digits_"),
        ("data=synthetics", "type data=synthetic"),
        ("data=zzz", "type data= with one of these"),
    ],
)
def test_an_unknown_choice_comes_with_all_choices_and_the_nearest(compose: Compose, override: str, advice: str) -> None:
    group = override.partition("=")[0]
    choices = sorted(option for g, option in options() if g == group)
    text = sentence_of(compose, override)
    assert text.startswith(f"{override} can't be chosen, the choices are {', '.join(choices)}: {advice}")


def test_a_choice_that_the_project_was_made_without_is_answered_so(
    compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(composition, "_left_out", lambda: ["experiment/gone", "model/net/gone"])
    for group in ("experiment", "model/net"):
        text = sentence_of(compose, f"{group}=gone")
        assert text.startswith(f"{group}=gone is an example of the template, which this project was made without")
        assert f"copy conf/{group}/gone.yaml" in text
    assert "template" not in sentence_of(compose, "experiment=other")


def test_a_group_that_the_command_does_not_use_can_be_added(compose: Compose) -> None:
    text = sentence_of(compose, "ckpt_path=x", "optimizer=sgd", name="evaluate")
    assert text == "optimizer is a config group that evaluate does not use: type +optimizer=CHOICE to add it"


@pytest.mark.parametrize("override", ["a b", "x=[1", "trainer.strategy=["])
def test_an_override_that_cant_be_read_is_shown_with_the_way_to_quote(compose: Compose, override: str) -> None:
    text = sentence_of(compose, override)
    assert text.startswith(f"the override {override} can't be read: type key=value, or quote it")
    assert "\n" not in text


def test_a_missing_value_is_named_with_what_to_type(compose: Compose) -> None:
    assert sentence_of(compose, name="evaluate") == "ckpt_path has no value: type ckpt_path=VALUE"
    text = sentence_of(compose, "data.batch_size=???")
    assert text == "data.batch_size has no value: type data.batch_size=VALUE"


def test_an_interpolation_of_nothing_names_the_key(compose: Compose) -> None:
    text = sentence_of(compose, "+x=${nothing}")
    assert text == "x reads nothing, which is not in the config: type +nothing=VALUE, or x=VALUE"
    assert sentence_of(compose, "~scheduler").endswith("not in the config: type scheduler=none")


def test_a_value_that_is_there_already_is_not_called_unknown(compose: Compose) -> None:
    text = sentence_of(compose, "+optimizer.lr=1")
    assert text == "optimizer.lr is in the config already, and + adds keys that are not: type optimizer.lr=1"


@pytest.mark.parametrize("error", [RuntimeError("x"), ValueError("x"), KeyError("x")])
def test_an_error_that_is_not_of_the_config_is_not_explained(error: Exception) -> None:
    assert explain(error, "train") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("optimizer.lr=0.1,seed=1", "optimizer.lr=0.1,seed=1"),
        ("model/net=mlp", "model-net=mlp"),
        ("a=[1, 2]", "a=-1,-2"),
        ("a='x y'", "a=-x-y"),
        ("../../etc", "..-..-etc"),
        ("/", ""),
        ("ä=ß", "ä=ß"),
        ("x" * 500, "x" * 120),
    ],
)
def test_a_slug_is_fit_for_a_folders_name(text: str, expected: str) -> None:
    assert slug(text) == expected
    assert "/" not in slug(text)


@pytest.mark.parametrize(
    "argument", ["callbacks=null", "logger=0", "+logger=[0,1]", "logger=[csv,nothing]", "model/net=true"]
)
def test_group_that_gets_no_name_is_told_with_its_choices(argument: str) -> None:
    group = argument.lstrip("+").partition("=")[0]
    with pytest.raises(UserError, match=rf"names no choice, there are .*: type {group}="):
        check_choices(["train", argument])


def test_names_sweeps_and_values_are_no_concern_of_that_check() -> None:
    check_choices(
        ["train", "-m", "logger=csv", "logger=csv,none", "callbacks=[default]", "seed=null", "a b", "=", "/=1"]
    )


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("trainer.devices=0,1", "type -m too, for a run with each, or 'trainer.devices=[0,1]' for one run on these"),
        (
            "optimizer.lr=0.1,0.01",
            "type -m too, for a run with each; for one value type 'optimizer.lr=[0.1,0.01]', a list, or "
            "'optimizer.lr=\"0.1,0.01\"', a text",
        ),
    ],
)
def test_several_values_of_a_single_run_are_told_how_to_be_meant(compose: Compose, typed: str, told: str) -> None:
    assert sentence_of(compose, typed) == f"{typed} gives several values: {told}"


@pytest.mark.parametrize("key", ["hydra.run.dir", "hydra.sweep.dir"])
def test_a_setting_of_hydra_that_names_no_folder_here_is_told_with_the_one_that_does(key: str) -> None:
    advice = r"has no effect on a run, .*: type paths\.run_dir=same, or paths\.outputs=same"
    with pytest.raises(UserError, match=f"^{key}=same {advice}"):
        check_folders(["train", "seed=1", f"{key}=same"], [key])
    check_folders(["train", "-m", "hydra.sweep.dir=same", "paths.run_dir=same"])
