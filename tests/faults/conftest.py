"""Commands in processes of their own that start in a moment: copies of a server that has imported everything."""

import contextlib
import io
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import pytest

from faults.kill_and_resume import OPTIONS
from interpreters import is_alive
from project.launch import agent

QUICK = (*OPTIONS, "callbacks=default", "launch.grace_s=30")


class Command:
    """``python -m project.train`` as its user sees it: exit code, output, ranks and run folder."""

    def __init__(self, arguments: tuple[str, ...], folder: Path, env: dict[str, str]) -> None:
        self.folder, self.cwd = folder / "run", folder
        self.log = folder / f"output_{time.monotonic_ns()}.txt"
        server: Any = forkserver._forkserver
        context = multiprocessing.get_context("forkserver")
        before = set(_children(server._forkserver_pid))
        self.process: BaseProcess = context.Process(
            target=run_command, args=(arguments, self.cwd, self.log, env, server._forkserver_address, list(sys.path))
        )
        self.process.start()
        self._others = before | {self.process.pid or 0}
        self._server = server._forkserver_pid

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def ranks(self) -> list[psutil.Process]:
        """In the order of their numbers; the command itself where it is the only one."""
        found = [psutil.Process(pid) for pid in _children(self._server) if pid not in self._others]
        return sorted(found, key=lambda process: process.pid)

    def until(self, condition: Callable[[], Any], timeout_s: float = 60) -> Any:
        """Wait while the command runs; what the condition returned."""
        end = time.monotonic() + timeout_s
        while not (found := condition()):
            assert self.process.is_alive(), self.output()
            assert time.monotonic() < end, self.output()
            time.sleep(0.02)
        return found

    def until_saved(self) -> None:
        self.until((self.folder / "checkpoints" / "last.ckpt").exists)

    def wait(self, timeout_s: float = 30) -> int:
        """The exit code; fails where there is none in time, or where a rank outlives it."""
        self.process.join(timeout_s)
        assert self.process.exitcode is not None, f"no end after {timeout_s} s: {self.output()}"
        end = time.monotonic() + 5
        while self.ranks() and time.monotonic() < end:
            time.sleep(0.02)
        assert self.ranks() == [], "a rank outlived its command"
        return self.process.exitcode

    def output(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def log_of(self, rank: int) -> str:
        """What a rank printed; that of rank 0 does not reach ``output``, since its server has another console."""
        path = self.folder / "ranks" / f"rank_{rank}.log"
        return path.read_text() if path.exists() else ""

    def kill(self) -> None:
        for process in [self.process, *self.ranks()]:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                process.kill()
        self.process.join(5)


def _children(pid: int) -> list[int]:
    return [p.pid for p in psutil.Process(pid).children() if is_alive(p)]


def run_command(
    arguments: tuple[str, ...], cwd: Path, log: Path, env: dict[str, str], server: Any, path: list[str]
) -> None:
    """What the process of a command does."""
    os.chdir(cwd)
    os.environ.update(env)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = (io.TextIOWrapper(io.FileIO(fd, "w", closefd=False), write_through=True) for fd in (1, 2))
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    # Its ranks come from the same server.
    forkserver._forkserver._forkserver_address = server  # type: ignore[attr-defined]
    forkserver.ensure_running = forkserver._forkserver.ensure_running = lambda: None  # type: ignore[method-assign]
    multiprocessing.set_start_method(None, force=True)
    sys.path[:] = path
    sys.argv = ["project.train", *arguments]
    from project.launch.cli import run
    from project.launch.resume import compose_resumed

    code = run("train", "project.train:train", compose_resumed)
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """``start("trainer.devices=2")`` begins a run in ``tmp_path/run``; ``env`` adds variables."""
    agent.warm_up()
    commands: list[Command] = []

    def begin(*overrides: str, env: dict[str, str] | None = None) -> Command:
        again = any(text.startswith("resume=") for text in overrides)
        arguments = overrides if again else (*QUICK, "paths.run_dir=run", *overrides)
        commands.append(Command(arguments, tmp_path, env or {}))
        return commands[-1]

    yield begin
    for command in commands:
        command.kill()
