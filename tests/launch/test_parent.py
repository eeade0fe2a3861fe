"""What a process does when the one that started it is gone."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from interpreters import is_alive

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a call of Linux")

# A command starts a server, which forks a number of ranks; the server and each rank print their process ids.
SCRIPT = """
import os, subprocess, sys, threading, time
from project.launch.parent import die_with_parent, end_with_parent

def start():
    subprocess.Popen([sys.executable, __file__, "server", sys.argv[2]])

def tell():
    os.write(1, f"{os.getpid()}\\n".encode())

if sys.argv[1] == "server":
    end_with_parent(grace_s=1 if int(sys.argv[2]) else 20)
    for _ in range(int(sys.argv[2])):
        if not os.fork():
            die_with_parent()
            tell()
            time.sleep(60)
            os._exit(0)
    tell()
elif sys.argv[1] == "thread":
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
else:
    start()
time.sleep(60)
"""


Started = tuple[subprocess.Popen[str], list[psutil.Process]]
Start = Callable[[str, int], Started]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """``start("command", 2)``: a command, its server and two ranks; by ``thread`` one that ends starts the server."""
    (tmp_path / "starts.py").write_text(SCRIPT)
    commands: list[Started] = []

    def begin(how: str, ranks: int) -> Started:
        arguments = [sys.executable, str(tmp_path / "starts.py"), how, str(ranks)]
        command = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
        assert command.stdout is not None
        commands.append((command, [psutil.Process(int(command.stdout.readline())) for _ in range(ranks + 1)]))
        return commands[-1]

    yield begin
    for command, started in commands:
        for process in [psutil.Process(command.pid), *started] if command.poll() is None else started:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        command.wait()
        assert command.stdout is not None
        command.stdout.close()


def all_end(processes: list[psutil.Process], within_s: float = 10) -> bool:
    end = time.monotonic() + within_s
    while any(map(is_alive, processes)) and time.monotonic() < end:
        time.sleep(0.01)
    return not any(map(is_alive, processes))


def test_a_server_and_its_ranks_end_with_the_command_also_when_they_are_stopped(start: Start) -> None:
    command, started = start("command", 2)
    next(process for process in started if process.ppid() != command.pid).suspend()
    command.kill()
    assert all_end(started)


def test_a_server_without_ranks_ends_at_once(start: Start) -> None:
    command, started = start("command", 0)
    command.kill()
    assert all_end(started, within_s=5)  # the grace is 20 s


def test_a_thread_of_the_command_may_end(start: Start) -> None:
    command, started = start("thread", 1)
    time.sleep(0.2)
    assert all(map(is_alive, started))
    command.kill()
    assert all_end(started)
