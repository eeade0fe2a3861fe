"""The server that ranks are forked from begins to import while the config is still composed."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from project.launch import devices
from project.strategies import SINGLE_PROCESS


def will_start_ranks(arguments: Sequence[str]) -> bool:
    """Whether a training that was typed so will, most likely, start ranks on this host.

    Where that is not so, a process has imported in vain, and ends with this one.
    """
    flags = {argument for argument in arguments[1:] if argument.startswith("-")}
    if flags - {"-m", "--multirun"} or devices.started_by():
        return False
    typed = dict(argument.lstrip("+").partition("=")[::2] for argument in arguments[1:] if argument not in flags)
    if typed.keys() & {"hydra/launcher", "trainer.num_nodes"}:
        return False
    strategy = typed.get("trainer/strategy") or typed.get("trainer.strategy")
    number = typed.get("trainer.devices", "1")
    return bool(flags) or (number not in ("1", "[0]", "[1]") and strategy not in SINGLE_PROCESS)


class Server:
    """Starts the server where a command line asks for ranks.

    Attributes:
        pid: This process, which then need not decide how threads wait: the server does, which it matters for. 0 where
            no server was started ahead.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self.pid = 0
        if will_start_ranks(arguments):
            from project.launch.agent import warm_up

            warm_up()
            self.pid = os.getpid()

    def end(self) -> None:
        """Leave no server behind that is about to import still, for a command that has ended with an error."""
        if self.pid != os.getpid():
            return
        from multiprocessing import forkserver  # here, since not every system has one

        server: Any = forkserver._forkserver
        if server._forkserver_pid is not None:
            with suppress(ProcessLookupError):
                os.kill(server._forkserver_pid, signal.SIGKILL)
            server._stop()
