"""One rank: its threads, its process group, its errors."""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing import util
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from project import cpu, errors
from project.files import write_whole
from project.launch.heartbeat import BEAT
from project.launch.parent import die_with_parent
from project.launch.rank_log import log_path, rank_log
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
        write_whole(path, json.dumps(words))


def dump_stacks_when_asked(folder: Path, rank: int) -> None:
    """Let SIGQUIT (Ctrl-\\) write the stacks of all threads into the rank's log, wherever they are."""
    if hasattr(faulthandler, "register"):
        log = log_path(folder, rank).open("a")  # stays open: the signal has no time to open it
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

    from project.launch.rendezvous import default_timeout, own_store, waiting_told

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
    with waiting_told(environment.global_rank(), environment.world_size()):
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
