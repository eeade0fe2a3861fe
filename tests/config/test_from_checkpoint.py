"""The config of evaluation and prediction: the run's, under what is typed, on the devices at hand."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from project.config.from_checkpoint import compose_from_checkpoint
from project.errors import UserError

Compose = Callable[..., DictConfig]
TYPED = (
    "seed=3", "data.batch_size=32", "trainer.max_epochs=7", "trainer.precision=bf16-mixed", "trainer.devices=4",
    "trainer.accelerator=cpu", "trainer/strategy=ddp", "model/net=residual_cnn", "model.net.width=8",
    "trainer.profiler=simple", "trainer.fast_dev_run=true",
)  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, compose: Compose) -> Path:
    path = tmp_path_factory.mktemp("run") / "best.ckpt"
    torch.save({"config": OmegaConf.to_container(compose(*TYPED), resolve=True)}, path)
    return path


@pytest.fixture(scope="module")
def evaluation(checkpoint: Path, compose: Compose) -> Callable[..., Any]:
    """The composed config of ``evaluate ckpt_path=... *typed``."""

    @functools.cache
    def run(*typed: str) -> DictConfig:
        arguments = ["evaluate", f"ckpt_path={checkpoint}", *typed]
        name = compose_from_checkpoint("evaluate", arguments)
        config = compose(*(a for a in arguments[1:] if not a.startswith("-")), name=name)
        OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
        return config

    return run


def test_the_runs_config_wins_over_the_defaults(evaluation: Callable[..., Any], checkpoint: Path) -> None:
    config = evaluation()
    assert (config.seed, config.name, config.data.batch_size, config.data.seed) == (3, "digits_mlp", 32, 3)
    assert config.model.net == {"_target_": "project.models.nets.ResidualCNN", "width": 8, "blocks": 3,
                                "image_shape": [1, 8, 8], "num_classes": 10}  # fmt: skip
    assert config.trainer.precision == "bf16-mixed"
    assert config.trainer.max_epochs == 7
    assert (config.split, config.ckpt_path) == ("test", str(checkpoint))


def test_devices_and_strategy_are_of_this_machine_not_of_the_run(evaluation: Callable[..., Any]) -> None:
    trainer = evaluation().trainer
    assert (trainer.devices, trainer.accelerator, trainer.strategy, trainer.num_nodes) == (1, "auto", "auto", 1)
    assert (trainer.profiler, trainer.fast_dev_run) == (None, False)


def test_what_belongs_to_the_training_alone_is_left_behind(evaluation: Callable[..., Any]) -> None:
    assert not {"callbacks", "logger", "monitor", "hparams"} & set(evaluation())


def test_what_is_typed_wins_over_the_run(evaluation: Callable[..., Any]) -> None:
    typed = {
        "data.batch_size": 8,
        "trainer.precision": "32-true",
        "trainer.devices": 2,
        "trainer.max_epochs": 1,
        "seed": 5,
        "model.net.width": 16,
        "split": "val",
        "+data.more": 1,
    }
    config = evaluation(*(f"{key}={value}" for key, value in typed.items()), "trainer/strategy=ddp_find_unused")
    assert {key: OmegaConf.select(config, key.lstrip("+")) for key in typed} == typed
    assert config.trainer.strategy == "ddp_find_unused_parameters_true"


def test_a_group_that_is_typed_takes_the_place_of_the_runs(evaluation: Callable[..., Any]) -> None:
    config = evaluation("data=synthetic", "data.length=100")
    assert config.data._target_ == "project.data.SyntheticImages"
    assert config.data.batch_size == 64
    assert "val_fraction" not in config.data
    assert config.data.seed == 3
    assert (config.data.length, config.data.val_length) == (100, 512)


@pytest.mark.parametrize(
    "typed",
    [
        ["model/net=mlp"],
        ["model=image_classifier", "model/net=mlp"],
        ["model/net=mlp", "model=image_classifier"],
    ],
    ids=" ".join,
)
def test_a_group_within_a_group_can_be_typed_in_any_order(evaluation: Callable[..., Any], typed: list[str]) -> None:
    net = evaluation(*typed).model.net
    assert net._target_ == "project.models.nets.MLP"
    assert net.width == 256
    assert "blocks" not in net


def test_a_schedule_can_be_taken_out(evaluation: Callable[..., Any]) -> None:
    assert evaluation("scheduler=none").scheduler is None


@pytest.mark.parametrize("command", ["evaluate", "predict"])
def test_a_command_without_a_checkpoint_says_what_to_type(command: str) -> None:
    with pytest.raises(UserError, match=f"{command} needs a checkpoint: type ckpt_path=<run folder>"):
        compose_from_checkpoint(command, [command, "split=val"])


@pytest.mark.parametrize("flag", ["--help", "--cfg=job", "--version", "-h"])
def test_help_needs_no_checkpoint(flag: str) -> None:
    assert compose_from_checkpoint("evaluate", ["evaluate", flag]) == "evaluate"


@pytest.mark.parametrize("value", ["a.ckpt,b.ckpt", "null", "[a]", "3"])
def test_a_checkpoint_that_is_no_path_is_refused(value: str) -> None:
    with pytest.raises(UserError, match="is no path: type ckpt_path="):
        compose_from_checkpoint("evaluate", ["evaluate", f"ckpt_path={value}"])


def test_a_checkpoint_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no file"):
        compose_from_checkpoint("evaluate", ["evaluate", f"ckpt_path={tmp_path}/no.ckpt"])


def test_the_folder_of_a_job_of_a_sweep_can_be_typed_as_it_is_shown(
    checkpoint: Path, tmp_path: Path, compose: Compose
) -> None:
    path = tmp_path / "0_optimizer.lr=0.1,seed=1" / "best.ckpt"
    path.parent.mkdir()
    path.write_bytes(checkpoint.read_bytes())
    arguments = ["evaluate", f"ckpt_path={path}"]
    name = compose_from_checkpoint("evaluate", arguments)
    assert compose(*arguments[1:], name=name).ckpt_path == str(path)


def test_a_group_can_be_swept_over_and_stays_among_what_was_typed(checkpoint: Path) -> None:
    arguments = ["evaluate", f"ckpt_path={checkpoint}", "data=digits,synthetic"]
    compose_from_checkpoint("evaluate", arguments)
    assert arguments[2] == "data=digits,synthetic"
