"""A Python that has imported what the commands import, and becomes each command that a test asks for.

``python tests/warm_interpreter.py MODULE`` imports the module (the fork server's, which freezes what it imported), then
reads requests as lines of JSON: ``argv`` (``["-m", "project.train", ...]``), ``cwd``, ``env``, and ``stdout`` and
``stderr`` (files). Each is a fork that runs the module as ``python -m`` would, in a session of its own. The answers, a
line each: its process id at once, and its exit code, negative for a signal, when it has ended.

A fresh interpreter would do, but needs two seconds of a core for the imports, and its fork server as much again.
"""

import importlib
import json
import multiprocessing.util
import os
import runpy
import sys
from typing import Any


def serve() -> dict[str, Any] | None:
    """The next request, in the process that is to run it; None in the server, when there are no more."""
    for line in sys.stdin.buffer:
        request: dict[str, Any] = json.loads(line)
        pid = os.fork()
        if pid == 0:
            return request
        answer(pid)
        answer(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    return None


def answer(number: int) -> None:
    os.write(1, f"{number}\n".encode())


def become(request: dict[str, Any]) -> None:
    """Make this fork what a shell would have started."""
    os.setsid()
    for target, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, request["stdout"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        (2, request["stderr"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
    ):
        source = os.open(path, flags, 0o600)
        os.dup2(source, target)
        os.close(source)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    _, module, *arguments = request["argv"]
    sys.argv = [module, *arguments]
    sys.orig_argv = [sys.executable, *request["argv"]]
    sys.path[0] = request["cwd"]
    multiprocessing.util.spawnv_passfds = fork_instead
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def fork_instead(path: bytes, args: list[str], passfds: list[int]) -> int:
    """multiprocessing starts its fork server as ``python -c CODE``: run the code in a copy of this process."""
    pid = os.fork()
    if pid:
        return pid
    keep = sorted({0, 1, 2, *passfds})
    for low, high in zip(keep, [*keep[1:], os.sysconf("SC_OPEN_MAX") + 1], strict=True):
        os.closerange(low + 1, high)
    status = 1
    try:
        exec(args[-1], {"__name__": "__main__"})
        status = 0
    finally:
        os._exit(status)


if __name__ == "__main__":
    importlib.import_module(sys.argv[1])
    request = serve()
    if request is not None:
        become(request)
