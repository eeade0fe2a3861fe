"""Which hyperparameters a run shows."""

from typing import Any

import pytest

from project.tracking.hparams import select_hparams

CONFIG: dict[str, Any] = {
    "hparams": ["seed", "optimizer", "model.net", "scheduler", "not.there"],
    "seed": 0,
    "name": "mine",
    "optimizer": {"_target_": "torch.optim.AdamW", "lr": 0.1, "betas": [0.9, 0.999], "_recursive_": False},
    "model": {"_target_": "a.Model", "net": {"_target_": "a.b.Net", "width": 8, "inner": {"_target_": "X", "p": None}}},
    "scheduler": None,
    "trainer": {"max_epochs": 3, "strategy": "auto"},
    "paths": {"run_dir": "somewhere"},
    "empty": {},
    "callbacks": {"best": {"_target_": "ModelCheckpoint", "dirpath": "somewhere"}},
}
NAMED = {
    "seed": 0,
    "optimizer": "AdamW",
    "optimizer.lr": 0.1,
    "optimizer.betas": "[0.9, 0.999]",
    "model.net": "Net",
    "model.net.width": 8,
    "model.net.inner": "X",
    "model.net.inner.p": "none",
    "scheduler": "none",
}


def test_what_the_config_names_is_shown_flat_with_classes_by_their_last_name() -> None:
    assert select_hparams(CONFIG, []) == NAMED


@pytest.mark.parametrize(
    ("override", "more"),
    [
        ("trainer.max_epochs=3", {"trainer.max_epochs": 3}),
        ("++name=mine", {}),
        ("model/net=mlp", {}),
        ("trainer/strategy=auto", {"trainer.strategy": "auto"}),
        ("optimizer.lr=0.1", {}),
        ("~scheduler", {}),
        ("~gone.key", {}),
        ("experiment=digits_mlp", {}),
        ("paths.run_dir=somewhere", {}),
        ("hydra.verbose=true", {}),
        ("name='a=b'", {}),
        ("callbacks=early_stopping", {"callbacks": "early_stopping"}),
    ],
)
def test_what_is_typed_is_shown_too_but_for_paths_names_and_hydra(override: str, more: dict[str, Any]) -> None:
    assert select_hparams(CONFIG, [override]) == NAMED | more


@pytest.mark.parametrize(
    ("value", "shown"),
    [(True, True), (3, 3), (0.5, 0.5), ("x", "x"), (None, "none"), ([1, 2], "[1, 2]"), ([], "[]")],
)
def test_values_are_plain_and_keep_their_type(value: Any, shown: Any) -> None:
    selected = select_hparams({"hparams": ["value"], "value": value}, [])
    assert selected == {"value": shown}
    assert type(selected["value"]) is type(shown)


def test_nothing_named_and_nothing_typed_shows_nothing() -> None:
    assert select_hparams({"hparams": [], "seed": 1}, []) == {}


def test_job_of_a_sweep_shows_what_the_sweep_varies_and_a_choice_by_its_name() -> None:
    config = CONFIG | {"sweep": {"job": {"varied": ["optimizer.lr", "model/net", "+trainer.max_epochs"]}}}
    typed = ["name=mine", "optimizer.lr=0.1", "model/net=small", "+trainer.max_epochs=3"]
    assert select_hparams(config, typed) == {"optimizer.lr": 0.1, "model.net": "small", "trainer.max_epochs": 3}


def test_single_run_shows_all_that_is_named_whatever_the_preset_of_sweeps() -> None:
    assert select_hparams(CONFIG | {"sweep": {"params": {}}}, []) == NAMED
