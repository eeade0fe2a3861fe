"""What is told of a key that the config does not have, or has already: what to type works."""

import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException
from omegaconf import DictConfig

from project.config.composition import config_folder, explain

MODULE = """
class Net:
    def __init__(self, lr=0.1, hidden=8): ...


class Wide(Net):
    def __init__(self, **options): ...


class Data:
    def __init__(self, folder="x"): ...
"""


@pytest.fixture(autouse=True)
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_of_keys.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)


def told_of(arguments: list[str]) -> str:
    with pytest.raises(ConfigCompositionException) as info:
        composed(arguments)
    sentence = explain(info.value, "train", arguments)
    assert sentence is not None
    return sentence


def composed(arguments: list[str]) -> DictConfig:
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        return compose("train", arguments)


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("model._target_=own_of_keys.Net model.lr=0.3", "own_of_keys.Net takes it: type +model.lr=0.3"),
        ("data._target_=own_of_keys.Data data.folder=x", "own_of_keys.Data takes it: type +data.folder=x"),
        ("model._target_=own_of_keys.Wide model.depth=3", "own_of_keys.Wide may take it: type +model.depth=3"),
        ("model._target_=own_of_keys.Wide model.lr=3", "own_of_keys.Wide takes it: type +model.lr=3"),
        ("trainer.barebones=true", "lightning.Trainer takes it: type +trainer.barebones=true"),
        ("optimizer.fused=false", "To add a new key type +optimizer.fused=false"),
        ("+data=synthetic", "data has a choice already, and + adds one to a group that has none: type data=synthetic"),
        ("+trainer.devices=2", "trainer.devices is in the config already, and + adds keys that are not: type t"),
        ("data.delay_ms=3", "but data=synthetic has it: type data=synthetic data.delay_ms=3"),
    ],
)
def test_what_to_type_is_told_and_is_taken(typed: str, told: str) -> None:
    arguments = typed.split()
    sentence = told_of(arguments)
    assert told in sentence
    advice = sentence.partition(" type ")[2].split()
    kept = [text for text in arguments if "_target_" in text]
    composed([*kept, *advice])


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("model._target_=own_of_keys.Net model.lrr=1", "did you mean +model.lr?"),
        ("model._target_=own_of_keys.Net model.depth=1", "own_of_keys.Net takes no depth: leave it out, or give"),
        ("model._target_=own_of_keys.Net +model.num_classes=3", "own_of_keys.Net takes no num_classes: leave it out"),
        ("model._target_=no_such_module.Net model.lr=1", "did you mean optimizer.lr?"),
        ("model.lr=1", "did you mean optimizer.lr?"),
        ("trainer.max_epoch=1", "did you mean trainer.max_epochs?"),
        ("trainer.barebone=true", "did you mean +trainer.barebones?"),
        ("trainer.zzz=1", "trainer.zzz is not in the config, and lightning.Trainer takes no zzz: leave it out"),
        ("trainer.batch_size=8", "did you mean data.batch_size?"),
        ("+data=digits", "data has a choice already: type data=CHOICE once, without a +"),
        ("data.batchsize=1", "did you mean data.batch_size?"),
    ],
)
def test_a_key_that_is_not_taken_is_answered_with_one_that_is(typed: str, told: str) -> None:
    sentence = told_of(typed.split())
    assert told in sentence
    assert not (typed.startswith("trainer.") and "type +" in sentence)


@pytest.mark.slow
@pytest.mark.parametrize(
    "typed", ["data.delay_ms=3", "trainer.max_epoch=3", "trainer.zzz=1", "data.folder=x", "+trainer.devices=2"]
)
def test_a_misspelt_key_does_not_import_torch(typed: str) -> None:
    code = "import sys; from project.launch.cli import run\ntry: run('train', 'project.train:train')\n"
    code += "finally: print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code, typed], capture_output=True, text=True, check=False)
    assert result.stdout == "False\n"
    assert "error: " in result.stderr
