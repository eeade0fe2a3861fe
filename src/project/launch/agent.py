"""Several ranks on this host, started and watched by torch's elastic agent (the engine of torchrun)."""

from __future__ import annotations

import functools
import json
import logging
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from project.errors import UserError, full_tracebacks
from project.launch import rank
from project.launch.heartbeat import Heartbeats
from project.launch.imports import import_for_good
from project.launch.run import Outcome, Run
from project.launch.stopping import EXIT_CODES, SIGNALS, Stopped

if TYPE_CHECKING:
    from project.launch.elastic import Agent

# What gloo and NCCL say when a rank has waited in vain for others.
TIMED_OUT = ("Timed out waiting", "Timed out after", "collective operation timeout")


class RankError(Exception):
    """A rank failed; the text is that rank's own traceback."""


def warm_up() -> None:
    """Start the server that the ranks are forked from; it imports in the background what they need."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["project.launch.fork_server"])
    with _ignored(*SIGNALS):
        # For the whole process group to be told to stop must not end it: its copies would count as lost.
        multiprocessing.forkserver.ensure_running()
    _environment_of_server()


@contextmanager
def _ignored(*signals: signal.Signals) -> Iterator[None]:
    """A process that is started meanwhile ignores these signals for good."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@functools.cache
def _environment_of_server() -> dict[str, str]:
    """The variables that the server was started with, and that its copies begin with."""
    return dict(os.environ)


def run_ranks(function: str, config: dict[str, Any], run: Run, num_ranks: int) -> Outcome:
    """Run ``function`` (``module:name``) on ``num_ranks`` ranks of this host; rank 0's outcome.

    Raises:
        UserError: the first rank that failed did so for something that the user can mend.
        RankError: it failed otherwise, or hung.
        Stopped: a signal asked the run to stop; all ranks have ended.
        KeyboardInterrupt: so did a second Ctrl-C, or one before training began.
    """
    import_for_good("project.launch.elastic")
    from torch.distributed.elastic.multiprocessing import SignalException

    warm_up()
    of_server = _environment_of_server()
    of_job = {name: value for name, value in os.environ.items() if of_server.get(name) != value}
    lifeline, held = multiprocessing.Pipe(duplex=False)
    with (
        tempfile.TemporaryDirectory(prefix="project-ranks-") as private,
        rank.environment_restored(),
        _signals_restored(),
        _usual_start_method(),
        held,
        lifeline,
    ):
        last_words = Path(private)
        heartbeats = Heartbeats(last_words / "heartbeats", num_ranks)
        assignment = rank.Assignment(function, config, run, last_words, of_job, heartbeats.path)
        agent = _agent(num_ranks, (assignment, lifeline), private, config["launch"], heartbeats, run)
        try:
            result = agent.run()
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise Stopped(error.sigval) from None
        finally:
            _remove_error_files(agent)
        if result.is_failed():
            if agent.hang and not agent.stop_signal:
                raise RankError(agent.hang)
            codes = [failure.exitcode for failure in result.failures.values() if failure.exitcode in EXIT_CODES]
            if codes or agent.stop_signal:
                if agent.hang:
                    print(agent.hang, file=sys.stderr)
                raise Stopped(agent.stop_signal or codes[0] - 128, saved=(last_words / rank.SAVED).exists())
            raise _first_error(last_words, result.failures, run, heartbeats, config["launch"].get("timeout_s"))
    outcome: Outcome = result.return_values[0]
    return outcome


def _agent(
    num_ranks: int, arguments: tuple[Any, ...], private: str, launch: dict[str, Any], heartbeats: Heartbeats, run: Run
) -> Agent:
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    from project.launch.elastic import Agent, Alone

    # The agent logs every failure in some twenty lines; the user gets the rank's own error from us.
    # Each of its modules has a logger with a level of its own.
    for name in ["torch.multiprocessing", *logging.root.manager.loggerDict]:
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    spec = WorkerSpec(
        role="rank",
        local_world_size=num_ranks,
        entrypoint=rank.main,
        args=arguments,
        rdzv_handler=Alone(),
        max_restarts=launch.get("max_restarts", 0),
        monitor_interval=0.001,  # the agent waits for the ranks themselves
    )

    def before_restart(failures: dict[int, Any]) -> str | None:
        error = _first_error(Path(private), failures, run, heartbeats, launch.get("timeout_s"))
        if isinstance(error, UserError):
            return None  # what the user must mend would only fail again
        for words in Path(private).glob("rank_*.json"):
            words.unlink()
        return str(error).rstrip()

    return Agent(spec, private, heartbeats, launch.get("hang_timeout_s"), launch.get("grace_s", 60), before_restart)


@contextmanager
def _signals_restored() -> Iterator[None]:
    """The agent installs signal handlers, and leaves them; a later Ctrl-C must find the usual ones."""
    names = {signal.SIGHUP, signal.SIGQUIT, *SIGNALS}
    before = {name: signal.getsignal(name) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


@contextmanager
def _usual_start_method() -> Iterator[None]:
    """The fork server takes over this process's way to start others, of which joblib's is unknown there."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(None, force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(before, force=True)


def _remove_error_files(agent: Agent) -> None:
    """torch's spawn leaves the pickled traceback of each failed rank in the temporary folder."""
    processes = getattr(agent._pcontext, "_pc", None)
    for path in getattr(processes, "error_files", []):
        if path is not None:
            Path(path).unlink(missing_ok=True)


def _first_error(
    last_words: Path,
    failures: dict[int, Any],
    run: Run,
    heartbeats: Heartbeats | None = None,
    timeout_s: float | None = None,
) -> Exception:
    """The error of the rank that failed first, by the ranks' own clocks, which one host shares."""
    told = [json.loads(path.read_text()) for path in last_words.glob("rank_*.json")]
    silent = {number: failure for number, failure in failures.items() if number not in {w["rank"] for w in told}}
    log = run.folder / "ranks"
    # Who fails before another is gone has lost nobody; who waited in vain may have.
    causes = [w for w in told if w["sentence"] and not any(text in w["traceback"] for text in TIMED_OUT)]
    if silent and not causes:
        number, failure = next(iter(silent.items()))
        aborted = {rank for rank, failure in silent.items() if failure.exitcode == -signal.SIGABRT}
        how = _without_words(failure.exitcode) + _waited_for(aborted, heartbeats, timeout_s)
        return RankError(f"rank {number} {how}; its output is in {log}/rank_{number}.log")
    first = min(causes if silent else told, key=lambda words: words["time_ns"])
    if first["sentence"] and not full_tracebacks():
        missing = _missing(first, told, heartbeats)
        return UserError(first["sentence"] + missing)
    return RankError(f"rank {first['rank']} failed first:\n{first['traceback']}{_missing(first, told, heartbeats)}")


def _without_words(exit_code: int) -> str:
    """How a rank ended that has left no error."""
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        hint = " (Linux does that where memory runs out: type fewer data.num_workers, or a smaller data.batch_size)"
        return f"was ended by {name}{hint if name == 'SIGKILL' else ''}"
    if exit_code == 0:
        return "ended by itself (exit code 0) in the middle of the run, as by os._exit(0)"
    return f"ended with exit code {exit_code}"


def _waited_for(aborted: set[int], heartbeats: Heartbeats | None, timeout_s: float | None) -> str:
    """Whom ranks probably waited for that NCCL has aborted: its watchdog raises nothing where a collective times out.

    Who aborts for another reason does it while the others are at work.
    """
    if not aborted or heartbeats is None or timeout_s is None:
        return ""
    others = sorted((s for s in heartbeats.read() if s.rank not in aborted), key=lambda sign: -sign.age_s)
    if not others or others[0].age_s < timeout_s / 2:
        return ""
    missing = "; ".join(map(str, others))
    return f": a collective has probably waited in vain for launch.timeout_s={timeout_s:g} (missing: {missing})"


def _missing(first: dict[str, Any], told: list[dict[str, Any]], heartbeats: Heartbeats | None) -> str:
    """Where the ranks are that another waited for in vain."""
    if heartbeats is None or not any(words in first["traceback"] for words in TIMED_OUT):
        return ""
    waiting = {words["rank"] for words in told if any(text in words["traceback"] for text in TIMED_OUT)}
    missing = [str(sign) for sign in heartbeats.read() if sign.rank not in waiting]
    return f" (missing: {'; '.join(missing)})" if missing else ""
