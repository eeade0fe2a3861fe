"""The command line, before Hydra reads it."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import project
from project.launch import cli, early_interrupt, hidden_modules, run_folder
from project.launch.cli import flags_first


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        (["train", "a=1", "-m", "b=1,2"], ["train", "-m", "a=1", "b=1,2"]),
        (["train", "a=1", "--multirun"], ["train", "--multirun", "a=1"]),
        (["train", "a=1", "--cfg", "job"], ["train", "a=1", "--cfg", "job"]),
    ],
)
def test_several_jobs_can_be_asked_for_at_any_place(typed: list[str], read: list[str]) -> None:
    flags_first(typed)
    assert typed == read


def test_nothing_is_asked_on_standard_input() -> None:
    """A prompt would hang a batch job; the tests of commands have no input that it could read either."""
    asks = re.compile(r"(?<![\w.])input\(|\bgetpass\b|\b(Prompt|Confirm)\b|\bsys\.stdin\b")
    sources = list(Path(project.__file__).parent.rglob("*.py"))
    assert len(sources) > 100
    assert [path.name for path in sources if asks.search(path.read_text())] == []


def interrupted(folder: Path | None) -> int:
    """The exit code of a command that Ctrl-C finds while its config is prepared, with or without a folder by then."""

    def prepare(name: str, arguments: list[str]) -> str:
        if folder is not None:
            run_folder.claim(folder)
        raise KeyboardInterrupt

    return cli.run("train", "project.train:train", prepare)


@pytest.fixture
def command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli.sys, "argv", ["train"])
    monkeypatch.setattr(cli.sys, "path", list(cli.sys.path))
    monkeypatch.setattr(cli, "CLAIMED", claimed := [])
    monkeypatch.setattr(run_folder, "CLAIMED", claimed)
    for name in ("HYDRA_FULL_ERROR", "RANK", "SLURM_PROCID"):
        monkeypatch.setenv(name, "0")


@pytest.mark.usefixtures("command_line")
def test_ctrl_c_before_there_is_a_folder_says_that_nothing_was_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert interrupted(None) == 130
    assert capsys.readouterr().err == "\nInterrupted before the run began; nothing was written.\n"


@pytest.mark.usefixtures("command_line")
def test_ctrl_c_names_the_folder_that_was_made(capsys: pytest.CaptureFixture[str]) -> None:
    assert interrupted(Path("outputs")) == 130
    assert re.fullmatch(r"\nInterrupted; what was written so far is in outputs/\S+\.\n", capsys.readouterr().err)


@pytest.mark.usefixtures("command_line")
def test_one_rank_of_several_tells_of_ctrl_c(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert interrupted(None) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (f"{Path(project.__file__).parent}/train.py", True),
        ("/somewhere/bin/project-train", True),
        ("/somewhere/train.py", False),
        ("-c", False),
        ("", False),
    ],
)
def test_a_program_that_imports_the_project_is_no_command(program: str, expected: bool) -> None:
    assert early_interrupt.is_command(program) == expected


@pytest.mark.slow
def test_ctrl_c_while_a_command_imports_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "hydra.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    done = subprocess.run(
        [sys.executable, "-m", "project.train"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert done.returncode == -signal.SIGINT
    assert done.stderr == "\nInterrupted before the run began; nothing was written.\n"


def test_a_long_temporary_folder_is_no_place_for_sockets(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 20)
    folder.mkdir()
    code = (
        "from project.launch import cli; cli._keep_sockets_short();"
        "from multiprocessing.connection import Listener; print(Listener(family='AF_UNIX').address)"
    )
    command, environment = [sys.executable, "-c", code], os.environ | {"TMPDIR": str(folder)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("/tmp/pymp-")
    assert not list(folder.iterdir())
    assert not Path(done.stdout.strip()).parent.exists()


@pytest.mark.slow
@pytest.mark.parametrize("file", ["random.py", "torch/__init__.py"])
def test_a_file_that_hides_a_module_is_named(tmp_path: Path, file: str) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    done = subprocess.run(
        [sys.executable, "-m", "project.train", "trainer.accelerator=cpu"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    name = file.partition("/")[0]
    assert last.startswith(f"error: ./{name} hides ")
    assert last.endswith(": rename it")


def test_only_files_of_the_working_folder_hide_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert hidden_modules.told(ImportError("any")) is None
    monkeypatch.setitem(sys.modules, "odd", SimpleNamespace(__file__=str(tmp_path / "odd.py")))  # type: ignore[arg-type]
    assert hidden_modules.told(ImportError("any")) is None
    monkeypatch.setitem(sys.modules, "queue", SimpleNamespace(__file__=str(tmp_path / "queue.py")))  # type: ignore[arg-type]
    assert hidden_modules.told(ImportError("any")) == "./queue.py hides Python's own module queue: rename it"
    assert hidden_modules.told(ValueError("any")) is None
