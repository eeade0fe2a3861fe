"""Two ways to run ``python -m project.NAME``: in a fresh interpreter, and in a fork of a warm one."""

import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Protocol

import psutil

WARM_INTERPRETER = Path(__file__).parent / "warm_interpreter.py"


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs, also where it ends at this moment; a zombie does not."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Command(Protocol):
    """A started command, as ``subprocess.Popen`` has it."""

    pid: int
    returncode: int | None

    def wait(self, timeout: float) -> int:
        """The exit code; raises ``subprocess.TimeoutExpired``."""
        ...


def start_fresh(argv: list[str], cwd: Path, env: dict[str, str], stdout: Path, stderr: Path) -> Command:
    """Start ``python ARGV`` as the leader of a session, with its output in two files and no input."""
    with stdout.open("wb") as out, stderr.open("wb") as error:
        return subprocess.Popen(
            [sys.executable, *argv],
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=error,
            start_new_session=True,
        )


class WarmInterpreter:
    """A running ``warm_interpreter.py``, for one command at a time."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, WARM_INTERPRETER, "project.launch.fork_server"],
            env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"},  # as commands may set it before they import torch
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self.pid = self._server.pid

    def start(self, argv: list[str], cwd: Path, env: dict[str, str], stdout: Path, stderr: Path) -> Command:
        """As ``start_fresh``."""
        assert self._server.stdin is not None
        request = {"argv": argv, "cwd": str(cwd), "env": env, "stdout": str(stdout), "stderr": str(stderr)}
        self._server.stdin.write(json.dumps(request).encode() + b"\n")
        return _Fork(self, argv)

    def answer(self, timeout_s: float) -> int | None:
        """The next number that the server tells; None when it tells none in time."""
        assert self._server.stdout is not None
        if not select.select([self._server.stdout], [], [], timeout_s)[0]:
            return None
        line = self._server.stdout.readline()
        assert line, f"{WARM_INTERPRETER.name} ended with exit code {self._server.wait()}"
        return int(line)

    def close(self) -> None:
        """End the server."""
        self._server.communicate()  # an end of its input


class _Fork:
    def __init__(self, interpreter: WarmInterpreter, argv: list[str]) -> None:
        self._interpreter, self._argv = interpreter, argv
        pid = interpreter.answer(60)  # the first has to wait for the imports
        assert pid is not None
        self.pid = pid
        self.returncode: int | None = None

    def wait(self, timeout: float) -> int:
        if self.returncode is None:
            self.returncode = self._interpreter.answer(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self._argv, timeout)
        return self.returncode
