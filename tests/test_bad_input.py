"""What bad input gets: one sentence, exit code 1, nothing left behind."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("command", "arguments", "words"),
    [
        ("train", "trainer.devicess=2", "trainer.devicess is not in the config: did you mean trainer.devices?"),
        ("train", "lr=0.1", "did you mean optimizer.lr?"),
        ("train", "modell/net=mlp", "did you mean model/net?"),
        ("train", "experiment=digits_mpl", "type experiment=digits_mlp"),
        ("train", "train=false", "train is not in the config"),
        ("train", "trainer.strategy=dpp", "type trainer.strategy=d"),
        ("train", "trainer.max_epochs=-3", "a whole number from 1, -1 for no limit"),
        ("train", "trainer.devices=4 data.batch_size=30", "type data.batch_size=28 or data.batch_size=32"),
        ("train", "trainer.accelerator=cuda trainer.devices=64", "CUDA device"),
        ("train", "trainer.devices=none", "type a number from 1, auto, -1 for all"),
        ("train", "paths.outputs=/proc/nowhere", "type paths.outputs=FOLDER"),
        ("train", "data._target_=nowhere.Data", "there is no module nowhere"),
        ("train", "optimizer.lr=", "optimizer.lr="),
        ("train", "trainer.num_nodes=2", "torchrun"),
        ("evaluate", "", "evaluate needs a checkpoint: type ckpt_path="),
        ("evaluate", "ckpt_path=nowhere.ckpt", "ckpt_path=nowhere.ckpt is no file"),
        ("predict", "ckpt_path=damaged.ckpt", "it is damaged or no checkpoint"),
    ],
)
def test_bad_input_gets_a_sentence(run_cli: Any, tmp_path: Path, command: str, arguments: str, words: str) -> None:
    (tmp_path / "damaged.ckpt").write_bytes(b"PK\x03\x04 and no more")
    result = run_cli(command, *arguments.split())
    assert result.returncode == 1
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert words in line
    assert not (tmp_path / "outputs").exists()


def test_traceback_comes_when_asked_for(run_cli: Any) -> None:
    result = run_cli("train", "trainer.max_epochs=-3", env={"HYDRA_FULL_ERROR": "1"})
    assert result.returncode == 1
    assert "Traceback" in result.stderr


def test_unknown_monitor_is_told_after_one_validation_batch(run_cli: Any) -> None:
    result = run_cli("train", "monitor=val/acc", "trainer.devices=2")
    assert result.returncode == 1
    assert "error: monitor=val/acc is not among what ImageClassifier logs" in result.stderr
    assert "type monitor=val/accuracy" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "arguments", ["--help", "--cfg job", "--info defaults", "--shell-completion install=bash", "trainer.devicess=2"]
)
def test_help_configs_completion_and_errors_import_neither_torch_nor_lightning(
    run_cli: Any, tmp_path: Path, arguments: str
) -> None:
    for name in ("torch", "lightning"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('a heavy import')")
    result = run_cli("train", *arguments.split(), env={"PYTHONPATH": str(tmp_path)})
    assert "a heavy import" not in result.stdout + result.stderr
    assert result.returncode == (1 if "=2" in arguments else 0)


@pytest.mark.parametrize("command", ["train", "evaluate", "predict"])
def test_console_script_finds_the_configs_from_any_folder(tmp_path: Path, command: str) -> None:
    script = Path(sys.executable).with_name(f"project-{command}")
    result = subprocess.run([script, "--cfg", "job"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "threads_per_rank: auto" in result.stdout


def test_console_script_finds_modules_of_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("class Data: ...")
    command = [Path(sys.executable).with_name("project-train"), "data._target_=own.Dat"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "own has no Dat: did you mean Data?" in result.stderr
