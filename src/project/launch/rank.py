"""One rank: its threads, its log, its process group, its errors."""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import json
import logging
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing import util
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from project import cpu, errors
from project.launch.full_disk import SparedStream
from project.launch.heartbeat import BEAT
from project.launch.parent import die_with_parent
from project.launch.quiet import quiet_libraries
from project.launch.run import Outcome, Run
from project.launch.stopping import Stopped, listening

if TYPE_CHECKING:
    from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment

GRACE_S = 0.3  # three looks of the launcher
# Files beside the last words: all ranks stop at the same step; and their state lies in a checkpoint.
AGREED = "agreed"
SAVED = "saved"

# Of a CUDA device, and of the host.
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")

Command = Callable[[dict[str, Any], Run], Outcome]


@dataclass(frozen=True)
class Assignment:
    """What the launching process hands to each rank it starts.

    Attributes:
        function: The command, ``module:name``.
        config: Composed and resolved.
        run: As the launching process knows it.
        errors: A folder for the ranks' last words.
        environment: Variables of this job alone, as ``hydra.job.env_set`` makes them.
        heartbeats: A file for the ranks' signs of life.
    """

    function: str
    config: dict[str, Any]
    run: Run
    errors: Path
    environment: dict[str, str]
    heartbeats: Path


def main(assignment: Assignment, lifeline: Connection) -> Outcome | None:
    """Run the command as the rank that the environment names; the outcome comes from rank 0."""
    die_with_parent()  # the server that it was forked from, which ends with the launcher
    os.environ.update(assignment.environment)
    rank = int(os.environ["RANK"])
    threading.Thread(target=_die_with_launcher, args=(lifeline, assignment.errors), daemon=True).start()
    # How this rank was started is not how its loaders start their workers: each would import all anew.
    multiprocessing.set_start_method(None, force=True)
    cpu.settle(assignment.config, int(os.environ["LOCAL_WORLD_SIZE"]))
    world_size = int(os.environ["WORLD_SIZE"])
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    BEAT.start(assignment.heartbeats, rank)
    with listening(), rank_log(assignment.run.folder, rank, own_console=rank == 0):
        dump_stacks_when_asked(assignment.run.folder, rank)
        try:
            with process_group(assignment.config):
                run = replace(
                    assignment.run, rank=rank, world_size=world_size, resumes=assignment.run.resumes or restarts > 0
                )
                try:
                    with faults_explained(assignment.config, world_size):
                        outcome = load(assignment.function)(assignment.config, run)
                except Exception as error:
                    # Before the group is left: the others fail as soon as they miss this rank.
                    _leave_last_words(assignment.errors, rank, error)
                    raise
        except Exception as error:
            _leave_last_words(assignment.errors, rank, error)
            # A rank that was killed leaves no words; the launcher must see it end before those that missed it.
            time.sleep(GRACE_S)
            raise
        except Stopped as stopped:
            if stopped.by_all:
                (assignment.errors / AGREED).touch()
            if stopped.saved and rank == 0:
                (assignment.errors / SAVED).touch()
            raise
    return outcome if rank == 0 else None


def load(function: str) -> Command:
    """The command that ``module:name`` names."""
    module, _, name = function.partition(":")
    command: Command = getattr(importlib.import_module(module), name)
    return command


def _die_with_launcher(lifeline: Connection, private: Path) -> None:
    """Wait until the launching process is gone, however it went, and go too: nothing is left behind."""
    with suppress(EOFError, OSError):
        lifeline.recv()
    shutil.rmtree(private, ignore_errors=True)
    os._exit(1)


def _leave_last_words(folder: Path, rank: int, error: Exception) -> None:
    """Note the error and when it came: the first of all ranks is the cause, the rest are consequences."""
    words = {
        "rank": rank,
        "time_ns": time.monotonic_ns(),
        "sentence": errors.sentence(error),
        "traceback": traceback.format_exc(),
    }
    path = folder / f"rank_{rank}.json"
    if not path.exists():
        beside = folder / f"{rank}.tmp"
        beside.write_text(json.dumps(words))
        beside.rename(path)


def dump_stacks_when_asked(folder: Path, rank: int) -> None:
    """Let SIGQUIT (Ctrl-\\) write the stacks of all threads into the rank's log, wherever they are."""
    if hasattr(faulthandler, "register"):
        log = _log_path(folder, rank).open("a")  # stays open: the signal has no time to open it
        faulthandler.register(signal.SIGQUIT, log, all_threads=True)


@contextmanager
def faults_explained(config: dict[str, Any], world_size: int) -> Iterator[None]:
    """Tell in a sentence of what a model and its data can't help: memory that ran out, a loader's worker that died."""
    from project.data.workers import let_workers_end, lost_worker

    try:
        yield
    except BaseException as error:
        let_workers_end()
        text = None
        if isinstance(error, MemoryError | RuntimeError):
            text = lost_worker(str(error)) or _lack_of_memory(error, config, world_size)
        if text is None:
            raise
        raise errors.UserError(text) from error


def _lack_of_memory(error: Exception, config: dict[str, Any], world_size: int) -> str | None:
    """The batch that did not fit, and what to try."""
    if not isinstance(error, MemoryError) and not any(words in str(error) for words in OUT_OF_MEMORY):
        return None
    size = config["data"].get("batch_size")
    batch = f"data.batch_size={size}" if size else "this batch"
    share = f" ({size // world_size} on each of {world_size} ranks)" if isinstance(size, int) and world_size > 1 else ""
    smaller = (
        f"data.batch_size={size // 2} trainer.accumulate_grad_batches=2" if isinstance(size, int) else "a smaller one"
    )
    return (
        f"memory ran out with {batch}{share}: type {smaller}, trainer.precision=bf16-mixed, more trainer.devices, "
        f"or trainer/strategy=fsdp, which spreads the training state ({' '.join(str(error).split())[:200]})"
    )


@contextmanager
def environment_restored() -> Iterator[None]:
    """Lightning leaves ranks, seeds and ports in the environment, where the next run would find them."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def process_group(config: dict[str, Any]) -> Iterator[None]:
    """Join the ranks' process group, and leave it: a group alive at exit can abort the process.

    NCCL's is left by all ranks together. A rank that fails alone would wait there for the others, which wait for it,
    and its error would be told when the first of them loses patience; so it ends without.

    Lightning finds the group and uses it. It is joined here because ranks that torchrun or SLURM started must
    agree on a run folder before there is a Trainer.
    """
    import torch
    from lightning.fabric.utilities.rank_zero import rank_zero_only

    from project.launch.rendezvous import default_timeout, own_store

    environment = cluster_environment()
    if environment.world_size() == 1:
        yield
        return
    rank_zero_only.rank = environment.global_rank()  # type: ignore[attr-defined]
    os.environ["MASTER_ADDR"] = environment.main_address
    os.environ["MASTER_PORT"] = str(environment.main_port)
    on_cuda = cpu.on_cuda(config)
    if on_cuda:
        from project.launch.devices import local_cuda_device

        there = torch.cuda.device_count()
        torch.cuda.set_device(local_cuda_device(config["trainer"]["devices"], environment.local_rank(), there))
    # The tracker reads the last collectives of torch's flight recorder, at 30 microseconds each.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "192")
    timeout = timedelta(seconds=config["launch"]["timeout_s"])
    torch.distributed.init_process_group(
        "nccl" if on_cuda else "gloo",
        store=own_store(timeout),
        rank=environment.global_rank(),
        world_size=environment.world_size(),
        timeout=timeout,
        device_id=torch.device("cuda", torch.cuda.current_device()) if on_cuda else None,
    )
    try:
        with default_timeout(timeout):
            yield
    except BaseException as error:
        if on_cuda and not getattr(error, "by_all", False):
            atexit.register(_end_at_once, error)
        else:
            torch.distributed.destroy_process_group()
        raise
    torch.distributed.destroy_process_group()


def _end_at_once(error: BaseException) -> None:
    """End a process that torchrun or SLURM started, before C++ leaves the group; our launcher's end so anyway."""
    util._exit_function()  # type: ignore[attr-defined]  # of multiprocessing: a loader's workers end
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(130 if isinstance(error, KeyboardInterrupt) else error.signum + 128 if isinstance(error, Stopped) else 1)


def cluster_environment() -> ClusterEnvironment:
    """Who started the ranks, for Lightning; named, because its own guess takes an idle SLURM shell for a job step."""
    from lightning.fabric.plugins.environments.lightning import LightningEnvironment
    from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
    from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

    from project.launch.devices import local_world_size, started_by

    launcher = started_by()
    if launcher == "torchrun":
        return TorchElasticEnvironment()
    if launcher == "slurm":
        # srun --ntasks alone is fine by us; Lightning insists on this variable.
        os.environ.setdefault("SLURM_NTASKS_PER_NODE", str(local_world_size()))
        return SLURMEnvironment(auto_requeue=False)
    return LightningEnvironment()


def _log_path(folder: Path, rank: int) -> Path:
    return folder / "ranks" / f"rank_{rank}.log"


@contextmanager
def rank_log(folder: Path, rank: int, own_console: bool, tell_errors: bool = False) -> Iterator[None]:
    """Keep the rank's output in ``<folder>/ranks/rank_N.log``; rank 0's goes to the console as well, as it is.

    With ``tell_errors`` the other ranks' errors reach the console too: where no launcher collects them.
    """
    quiet_libraries()
    path = _log_path(folder, rank)
    path.parent.mkdir(exist_ok=True)
    if not own_console:
        # The process is this rank's alone: its file descriptors are turned over for good, so that what C++
        # libraries print arrives in the log too.
        console = os.dup(2)
        with path.open("ab") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        sys.stdout, sys.stderr = (cast("TextIO", SparedStream(stream)) for stream in (sys.stdout, sys.stderr))
        try:
            yield
        except Exception:
            traceback.print_exc()
            if tell_errors:
                os.write(console, f"rank {rank} failed:\n{traceback.format_exc()}".encode())
            raise
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
        return
    stdout, stderr = sys.stdout, sys.stderr
    with path.open("a", buffering=1) as file:
        spared = cast("TextIO", SparedStream(file))
        own = Tee(stdout, spared), Tee(stderr, spared)
        tees = cast("tuple[TextIO, TextIO]", own)
        sys.stdout, sys.stderr = tees
        _redirect_loggers((stdout, stderr), tees)
        try:
            yield
        except Exception:
            for tee in own:
                tee.finish()
            spared.write(traceback.format_exc())
            raise
        finally:
            for tee in own:
                tee.finish()
            sys.stdout, sys.stderr = stdout, stderr
            _redirect_loggers(tees, (stdout, stderr))


def _redirect_loggers(before: tuple[TextIO, TextIO], after: tuple[TextIO, TextIO]) -> None:
    """Logging handlers hold on to the console that was there when they were made."""
    for name in ("", "lightning", "lightning.pytorch", "lightning.fabric"):
        for handler in logging.getLogger(name).handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream in before:
                handler.setStream(after[before.index(handler.stream)])


CURSOR_UP = re.compile(r"\x1b\[(\d*)A")


class Tee:
    """A console that is also written to a log: whole lines, without the bar's redrawings and colours."""

    def __init__(self, console: TextIO, log: TextIO) -> None:
        self._console = console
        self._log = log
        self._line = ""
        self._redrawn: list[str] = []  # lines of a bar of several lines, until they are drawn anew or left alone
        self._num_to_redraw = 0

    def write(self, text: str) -> int:
        self._line += text
        *lines, self._line = self._line.split("\n")
        for line in lines:
            self._end(line)
        self._line = self._line.rpartition("\r")[2]
        return self._console.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def finish(self) -> None:
        """Log what is still held back."""
        if self._line:
            self._end(self._line)
        self._line = ""
        self._log.writelines(self._redrawn)
        self._redrawn = []

    def _end(self, line: str) -> None:
        last_drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).rstrip("\r").rpartition("\r")[2]
        if line.strip("\r") and not last_drawn.strip():
            return
        # rich goes up over all lines of its bars and draws each again.
        lines_up = sum(int(number or 1) for number in CURSOR_UP.findall(line))
        if lines_up:
            self._num_to_redraw, self._redrawn = lines_up, []
        if self._num_to_redraw:
            self._num_to_redraw -= 1
            self._redrawn.append(last_drawn + "\n")
        else:
            self._log.writelines([*self._redrawn, last_drawn + "\n"])
            self._redrawn = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._console, name)
