"""``--help``: three examples first, and a line for each choice of the config."""

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from project.config.composition import config_folder
from project.launch import usage
from project.launch.usage import description, groups, is_asked_for

PACKAGE = usage.__name__.partition(".")[0]
SCRIPTS = [script.module for script in entry_points(group="console_scripts") if script.module.startswith(f"{PACKAGE}.")]
COMMANDS = sorted(module.rpartition(".")[2] for module in SCRIPTS)
WITH_CONFIG = [name for name in COMMANDS if (config_folder() / f"{name}.yaml").exists()]
FILES = sorted(path.relative_to(config_folder()) for path in config_folder().glob("*/**/*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=str)
def test_a_config_file_begins_with_a_sentence_on_what_it_is(file: Path) -> None:
    assert 5 <= len(description(config_folder() / file)) <= 160


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# One. Two.\na: 1", "One"),
        ("# @package _global_\n# One, which goes\n# on. Two.\n", "One, which goes on"),
        ("# lr=0.1 is tried: yes\n", "lr=0.1 is tried: yes"),
        ("a: 1 # one\n# Two.", ""),
        ("# @package _global_\n", ""),
    ],
)
def test_what_a_choice_is_is_the_first_sentence_of_the_first_comment(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(text)
    assert description(file) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--help", True),
        ("-m a=1 -h", True),
        ("a=1", False),
        ("--hydra-help", False),
        ("--help --config-dir more", False),
    ],
)
def test_help_with_other_flags_is_left_to_hydra(arguments: str, expected: bool) -> None:
    assert is_asked_for(["train", *arguments.split()]) is expected


def test_there_are_commands() -> None:
    assert {"train", "evaluate", "predict", "benchmark", "runs", "doctor", "rename"} <= set(COMMANDS)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_help_begins_with_three_examples_and_has_a_line_for_each_choice(run_cli: Any, command: str) -> None:
    result = run_cli(command, "--help")
    assert result.returncode == 0, result.stderr
    examples = result.stdout.partition("\n\n")[0].splitlines()
    assert len(examples) == 3
    assert all(line.startswith(f"python -m project.{command}") for line in examples)
    if command in WITH_CONFIG:
        check_choices(command, " ".join(result.stdout.split()))


def check_choices(command: str, shown: str) -> None:
    for group in groups():
        files = sorted((config_folder() / group).glob("*.yaml"))
        listed = [file for file in files if f"{file.stem} {description(file)}" in shown]
        if f"{group} (now " in shown:
            assert listed == files
    assert "trainer/strategy (now auto)" in shown
    first = min(file.stem for file in (config_folder() / "data").glob("*.yaml"))
    assert (f"data {first}" in shown) is (command in ("evaluate", "predict"))  # the checkpoint's, unless typed
    assert ("benchmark (now scaling)" in shown) is (command == "benchmark")


@pytest.mark.slow
def test_help_shows_the_config_as_it_would_be_with_what_is_typed(run_cli: Any) -> None:
    shown = run_cli("train", "--help", "optimizer=sgd", "logger=[csv,tensorboard]").stdout
    assert "optimizer (now sgd)" in shown
    assert "logger (now csv, tensorboard)" in shown
    assert "_target_: torch.optim.SGD" in shown
    wrong = run_cli("train", "--help", "optimizer=sdg")
    assert wrong.returncode == 0, wrong.stderr
    assert "Shown without what was typed, which can't be: optimizer=sdg can't be chosen" in wrong.stdout
    several = run_cli("train", "-m", "--help", "optimizer.lr=0.1,0.01", "trainer.devices=2")
    assert several.returncode == 0, several.stderr
    assert "devices: 2" in several.stdout


def test_no_help_waits_for_torch(tmp_path: Path) -> None:
    code = """
import importlib, sys
for name in sys.argv[1:]:
    sys.argv = [name, "--help"]
    try:
        importlib.import_module(f"project.{name}").main()
    except SystemExit as end:
        assert not end.code, name
    assert "torch" not in sys.modules, name
"""
    command = [sys.executable, "-c", code, *COMMANDS]
    subprocess.run(command, cwd=tmp_path, stdout=subprocess.DEVNULL, check=True, timeout=60)
