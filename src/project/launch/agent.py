"""Several ranks on this host, started and watched by torch's elastic agent (the engine of torchrun)."""

from __future__ import annotations

import functools
import json
import logging
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from project.errors import UserError, full_tracebacks
from project.launch import rank
from project.launch.run import Outcome, Run

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

# What every rank imports: the fork server does it once, and each rank starts as a copy of it.
PRELOAD = [
    "lightning",
    "torchmetrics.classification",
    "torch.utils.tensorboard",
    "hydra.utils",
    "sklearn.datasets",
    "project.launch.rank",
    "project.launch.checkpoint",
    "project.models",
    "project.data",
    "project.tracking.tensorboard",
    "project.tracking.tracker",
]
STOP_TIMEOUT_S = 2  # from the first signal to the last: the ranks may finish their logs in between


class RankError(Exception):
    """A rank failed; the text is that rank's own traceback."""


def warm_up() -> None:
    """Start the server that the ranks are forked from; it imports in the background what they need."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    multiprocessing.forkserver.ensure_running()
    _environment_of_server()


@functools.cache
def _environment_of_server() -> dict[str, str]:
    """The variables that the server was started with, and that its copies begin with."""
    return dict(os.environ)


def run_ranks(function: str, config: dict[str, Any], run: Run, num_ranks: int) -> Outcome:
    """Run ``function`` (``module:name``) on ``num_ranks`` ranks of this host; rank 0's outcome.

    Raises:
        UserError: the first rank that failed did so for something that the user can mend.
        RankError: it failed otherwise.
        KeyboardInterrupt: Ctrl-C; all ranks have ended.
    """
    from torch.distributed.elastic.multiprocessing import SignalException

    warm_up()
    of_server = _environment_of_server()
    of_job = {name: value for name, value in os.environ.items() if of_server.get(name) != value}
    lifeline, held = multiprocessing.Pipe(duplex=False)
    with (
        tempfile.TemporaryDirectory(prefix="project-ranks-") as private,
        rank.environment_restored(),
        _signals_restored(),
        held,
        lifeline,
    ):
        last_words = Path(private)
        assignment = rank.Assignment(function, config, run, last_words, of_job)
        agent = _agent(num_ranks, (assignment, lifeline), private)
        try:
            result = agent.run()
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + error.sigval) from None
        finally:
            agent.get_worker_group().spec.rdzv_handler.shutdown()
            _remove_error_files(agent)
        if result.is_failed():
            raise _first_error(last_words, result.failures, run)
    outcome: Outcome = result.return_values[0]
    return outcome


def _agent(num_ranks: int, arguments: tuple[Any, ...], private: str) -> LocalElasticAgent:
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    # The agent logs every failure in some twenty lines; the user gets the rank's own error from us.
    for name in ("torch.distributed.elastic", "torch.multiprocessing"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # The store that the agents meet at is not shared with the ranks: its keys would outlive a restart.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    rendezvous = RendezvousParameters(
        backend="c10d",
        endpoint="localhost:0",
        run_id=uuid.uuid4().hex,
        min_nodes=1,
        max_nodes=1,
        local_addr="localhost",
    )
    spec = WorkerSpec(
        role="rank",
        local_world_size=num_ranks,
        entrypoint=rank.main,
        args=arguments,
        rdzv_handler=get_rendezvous_handler(rendezvous),
        max_restarts=0,
        monitor_interval=0.1,
    )
    return LocalElasticAgent(
        spec,
        DefaultLogsSpecs(log_dir=private),
        start_method="forkserver",
        shutdown_timeout=STOP_TIMEOUT_S,
    )


@contextmanager
def _signals_restored() -> Iterator[None]:
    """The agent installs signal handlers, and leaves them; a later Ctrl-C must find the usual ones."""
    names = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {name: signal.getsignal(name) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


def _remove_error_files(agent: LocalElasticAgent) -> None:
    """torch's spawn leaves the pickled traceback of each failed rank in the temporary folder."""
    processes = getattr(agent._pcontext, "_pc", None)
    for path in getattr(processes, "error_files", []):
        if path is not None:
            Path(path).unlink(missing_ok=True)


def _first_error(last_words: Path, failures: dict[int, Any], run: Run) -> Exception:
    """The error of the rank that failed first, by the ranks' own clocks, which one host shares."""
    told = [json.loads(path.read_text()) for path in last_words.glob("rank_*.json")]
    silent = {number: failure for number, failure in failures.items() if number not in {w["rank"] for w in told}}
    log = run.folder / "ranks"
    if silent:
        number, failure = next(iter(silent.items()))
        if failure.exitcode < 0:
            name = signal.Signals(-failure.exitcode).name
            return RankError(f"rank {number} was ended by {name}; its output is in {log}/rank_{number}.log")
        return RankError(
            f"rank {number} ended with exit code {failure.exitcode}; its output is in {log}/rank_{number}.log"
        )
    first = min(told, key=lambda words: words["time_ns"])
    if first["sentence"] and not full_tracebacks():
        return UserError(first["sentence"])
    return RankError(f"rank {first['rank']} failed first:\n{first['traceback']}")
