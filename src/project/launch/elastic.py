"""torch's elastic agent, which also passes signals on, watches for ranks that hang, and says why it restarts."""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from project.launch.heartbeat import Heartbeats, describe_hang
from project.launch.rank import AGREED
from project.launch.stopping import EXIT_CODES, SIGNALS

STOP_TIMEOUT_S = 2  # from a rank's failure to the end of the others: they may finish their logs in between
LOOK_EVERY_S = 0.1  # at the ranks' signs of life, while none ends
DUMP_S = 0.5  # time for ranks to write their stacks


def free_port() -> int | None:
    """A port for rank 0 to listen at, a moment later; None, for any, where none is found.

    Of those below 32768, which Linux does not give to connections: one of these could take it meanwhile.
    """
    for port in random.SystemRandom().sample(range(20000, 32000), 100):
        with socket.socket() as own, contextlib.suppress(OSError):
            own.bind(("", port))
            return port
    return None


def set_without_waiting(event: Any, most: int) -> None:
    """``multiprocessing.Event.set`` for at most so many that wait; its own waits until each of them has woken.

    A rank that has returned waits for such an event, and may be killed there: it would never wake.
    """
    event._flag.release()
    for _ in range(most):
        event._cond._wait_semaphore.release()


class Alone(RendezvousHandler):
    """Where an agent without others meets them: at once.

    torch's own would ask its store a second later whether others came; before each job of a sweep, and each restart.
    """

    def next_rendezvous(self) -> RendezvousInfo:
        store = HashStore()  # of this start alone: what former ranks left in it can't be taken for these ranks'
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo.build(0, store, "localhost", free_port()))

    def get_backend(self) -> str:
        return "alone"

    def get_run_id(self) -> str:
        return "alone"

    def num_nodes_waiting(self) -> int:
        return 0

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def shutdown(self) -> bool:
        return True


class Agent(LocalElasticAgent):
    """Starts the ranks, and ends all when one fails or hangs.

    Args:
        spec: What to run, on how many ranks.
        logs: A folder for torch's own files.
        heartbeats: What the ranks say of themselves.
        hang_timeout_s: Without a sign of life for so long, a rank hangs; None waits forever.
        grace_s: From a signal that asks to stop to the end of ranks that have not.
        before_restart: Called with the failures, by rank; returns why they are restarted, or None where a restart
            would change nothing.

    Attributes:
        stop_signal: What this process was asked by; 0 where it was not.
        hang: Which rank hung, and what the others did.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs: str,
        heartbeats: Heartbeats,
        hang_timeout_s: float | None,
        grace_s: float,
        before_restart: Callable[[dict[int, ProcessFailure]], str | None],
    ) -> None:
        super().__init__(
            spec, DefaultLogsSpecs(log_dir=logs), start_method="forkserver", shutdown_timeout=STOP_TIMEOUT_S
        )
        self.heartbeats = heartbeats
        self.hang_timeout_s = hang_timeout_s
        self.grace_s = grace_s
        self.before_restart = before_restart
        self.stop_signal = 0
        self._agreed = Path(logs, AGREED)
        self.hang: str | None = None
        self._all_returned = False
        self._stop_at = 0.0
        self._look_at = 0.0

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        pids: dict[int, Any] = super()._start_workers(worker_group)
        context: Any = self._pcontext
        close = context._close
        # Who has to end by now does not end by itself: ranks take SIGTERM for a wish.
        context._close = lambda death_sig, timeout=STOP_TIMEOUT_S: close(signal.SIGKILL, timeout)
        finished = context._worker_finished_event
        self._all_returned = False

        def let_go() -> None:
            self._all_returned = True
            set_without_waiting(finished, len(pids))

        finished.set = let_go
        with contextlib.suppress(ValueError):  # not in the main thread
            for number in SIGNALS:
                signal.signal(number, self._on_signal)
        return pids

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        """Pass it on: the ranks save and end. A second Ctrl-C ends them at once."""
        self._remaining_restarts = 0
        if self.stop_signal and signum == signal.SIGINT:
            self._signal_ranks(signal.SIGKILL)
            raise KeyboardInterrupt
        if not self.stop_signal:
            self.stop_signal, self._stop_at = signum, time.monotonic()
        # The terminal sends SIGINT to the ranks too, and two would be one too many.
        self._signal_ranks(signal.SIGTERM if signum == signal.SIGINT else signal.Signals(signum))

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        # torch's agent sleeps between two looks; so the end of a rank is seen when it comes.
        multiprocessing.connection.wait([p.sentinel for p in self._processes() if p.exitcode is None], LOOK_EVERY_S)
        dead = self._dead()
        now = time.monotonic()
        if not dead and now >= self._look_at:
            self._look_at = now + 1
            if self.stop_signal and now > self._stop_at + self.grace_s:
                self.hang = (
                    f"the ranks did not come to the end of a step within launch.grace_s={self.grace_s:g} of "
                    f"{signal.Signals(self.stop_signal).name}, and were ended: their last checkpoint stands"
                )
            elif (hung := self._hung()) is not None:
                self.hang = hung
                self._dump_stacks()
            if self.hang:
                self._signal_ranks(signal.SIGKILL)
                dead = {0: 1}
        if not dead:
            result: RunResult = super()._monitor_workers(worker_group)
            dead = self._dead() if result.is_failed() else {}
            if not dead:
                return result
        # Who was asked to stop has saved together with the others, which are about to end; or it has left them, and
        # they may wait for it within torch, where no signal is heard.
        asked = any(code in EXIT_CODES for code in dead.values())
        self._wait_for_end(self.grace_s if asked and self._agreed.exists() else STOP_TIMEOUT_S)
        if -signal.SIGABRT in dead.values():  # NCCL aborts all that have waited in vain, one after another
            dead |= {rank: code for rank, code in self._dead().items() if code == -signal.SIGABRT}
        self._signal_ranks(signal.SIGKILL)
        failures = {
            rank: ProcessFailure(local_rank=rank, pid=self._processes()[rank].pid, exitcode=code, error_file="<N/A>")
            for rank, code in dead.items()
        }
        if asked or self.stop_signal:
            self._remaining_restarts = 0
        if self._remaining_restarts:
            why = self.before_restart(failures)
            if why is None:
                self._remaining_restarts = 0
            else:
                attempt = worker_group.spec.max_restarts - self._remaining_restarts + 1
                print(
                    f"{self.hang or why}\nAll ranks start again from their last checkpoint (restart {attempt} of "
                    f"{worker_group.spec.max_restarts}).",
                    file=sys.stderr,
                    flush=True,
                )
                self.hang = None
                self.heartbeats.clear()
        return RunResult(state=WorkerState.FAILED, failures=failures)

    def _processes(self) -> list[Any]:
        return list(getattr(getattr(self._pcontext, "_pc", None), "processes", []))

    def _dead(self) -> dict[int, int]:
        """Exit codes by rank, of those that failed: with 0 who left before all had handed over what they return."""
        fine = (None, 0) if self._all_returned else (None,)
        return {rank: p.exitcode for rank, p in enumerate(self._processes()) if p.exitcode not in fine}

    def _signal_ranks(self, number: signal.Signals) -> None:
        for process in self._processes():
            if process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def _wait_for_end(self, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while any(process.is_alive() for process in self._processes()) and time.monotonic() < end:
            time.sleep(0.02)

    def _hung(self) -> str | None:
        signs = self.heartbeats.read() if self.hang_timeout_s is not None else []
        late = [sign for sign in signs if self.hang_timeout_s is not None and sign.age_s > self.hang_timeout_s]
        if not late:
            return None
        # The others wait for it in an exchange, which they came to after it had fallen silent.
        culprit = max(signs, key=lambda sign: (self._is_stopped(sign.rank), sign.age_s))
        return describe_hang(culprit, signs, self._is_stopped(culprit.rank))

    def _is_stopped(self, rank: int) -> bool:
        try:
            status = psutil.Process(self._processes()[rank].pid).status()
        except psutil.NoSuchProcess:
            return False
        return status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)

    def _dump_stacks(self) -> None:
        """Let every rank write the stacks of its threads into its log; see ``rank.dump_stacks_when_asked``."""
        self._signal_ranks(signal.SIGQUIT)
        self._signal_ranks(signal.SIGCONT)  # one that is stopped can't write
        time.sleep(DUMP_S)
