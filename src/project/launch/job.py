"""One job: from a composed config to its outcome, on as many ranks as the config says."""

from __future__ import annotations

import os
import random
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from project import cpu
from project.config import combinations, monitor_mode, preflight, strategy_names, trust, unread_keys
from project.config.secrets import check_unmasked, masked, masked_arguments, unmasked
from project.errors import UserError, full_tracebacks
from project.launch import agent, devices, host_watchdog, rank, requeue, resume, run_folder, run_state, watchdog
from project.launch.clock import process_started_at
from project.launch.imports import import_for_ranks
from project.launch.rank_log import rank_log
from project.launch.run import Outcome, Run
from project.launch.stopping import TOLD, Stopped, listening
from project.launch.summary import announce, shorten, summarize
from project.strategies import is_single_process, pipeline_layout, ranks_per_batch

MOST_KEYS = 3  # of a group, that are named where it loses more


def run_job(
    function: str,
    composed: DictConfig,
    overrides: list[str],
    kind: str = "train",
    sweep_folder: Path | None = None,
    started_at: float | None = None,
) -> Outcome:
    """Check the config, claim a run folder, run ``function`` (``module:name``) on every rank, print what came of it.

    ``kind`` is the command's name; the folders of all but ``train`` begin with it. ``sweep_folder`` is the run
    folder that a sweep chose. ``started_at``, in seconds since 1970, is by default the start of this process.

    Raises:
        UserError: something in the config can't work; nothing was started and no folder was made.
    """
    in_sweep = sweep_folder is not None
    if in_sweep:  # whose process has begun with the first of its jobs
        started_at = started_at or time.time()
    config = checked(composed, overrides, kind)
    launcher = devices.started_by()
    if launcher:
        return _run_as_rank(function, composed, overrides, kind, launcher, sweep_folder)
    if in_sweep or not (is_single_process(config["trainer"]["strategy"]) or config["trainer"]["devices"] == 1):
        agent.warm_up()  # imports on another core while this process goes on
    num_ranks, num_devices = count_ranks(config, kind)
    complete = _complete_of_requeued(composed, overrides, kind)
    if complete is not None:
        return complete
    # A job of a sweep gets a process of its own even when it is alone: nothing leaks from job to job. So does a rank
    # that is to be started again when it dies.
    here = num_ranks == 1 and not in_sweep and not config["launch"]["max_restarts"]
    with _opened_run(composed, overrides, kind, sweep_folder, started_at) as (config, run), _stop_told(run, kind):
        if not in_sweep:  # which has a line of its own for each job that ends
            announce(kind, config, run, num_ranks, num_devices)
        if here:
            outcome = _run_here(function, config, run, kind)
        else:
            outcome = agent.run_ranks(function, config, run, num_ranks)
        if not in_sweep:
            summarize(kind, config, run, outcome)
    return outcome


def checked(
    composed: DictConfig, overrides: list[str], kind: str, tell: Callable[[str], object] | None = None
) -> dict[str, Any]:
    """The config as plain data, if it can work; a ``seed`` of null is drawn. ``tell`` gets what else is to be known.

    Raises:
        UserError: it can't.
    """
    if composed.get("seed", 0) is None:
        composed.seed = random.SystemRandom().randrange(2**32)
    unread_keys.check_added(composed, overrides, kind)
    config = _plain(composed, overrides, tell=tell)
    preflight.check(config)
    combinations.check(config)
    monitor_mode.check_mode(config, overrides)
    return config


def count_ranks(config: dict[str, Any], kind: str) -> tuple[int, int]:
    """Ranks that are to be started on this host, and its devices that they drive.

    Raises:
        UserError: there are fewer devices, or the ranks can't share the batch.
    """
    trainer = config["trainer"]
    one_process = is_single_process(trainer["strategy"])
    if trainer["num_nodes"] > 1 and not one_process:
        raise UserError(
            f"trainer.num_nodes={trainer['num_nodes']}: several hosts are started by torchrun or SLURM: type "
            "torchrun --nnodes N --nproc-per-node M -m project.train ..., or trainer.num_nodes=1"
        )
    num_devices = devices.count(trainer["accelerator"], trainer["devices"])
    num_ranks = 1 if one_process else num_devices
    batch_shares = num_ranks // ranks_per_batch(trainer["strategy"], num_ranks)
    if kind == "train":  # evaluation shares any number of samples out
        preflight.check_batch_size(config, batch_shares, pipeline_layout(trainer["strategy"], num_ranks))
    return num_ranks, num_devices


@contextmanager
def _stop_told(run: Run, kind: str) -> Iterator[None]:
    """Say where a run goes on that a signal has stopped; in SLURM, put it into the queue again."""
    try:
        yield
    except (Stopped, KeyboardInterrupt) as stopped:
        if stopped.args == (TOLD,):
            raise
        signum = stopped.signum if isinstance(stopped, Stopped) else signal.SIGINT
        if run.rank == 0:
            print(_after_stop(run.folder, kind, signum, getattr(stopped, "saved", False)), file=sys.stderr)
            if told := requeue.requeue(signum):
                print(told, file=sys.stderr, flush=True)
        if signum == signal.SIGINT:
            raise KeyboardInterrupt(TOLD) from None
        raise


def _after_stop(folder: Path, kind: str, signum: int, saved: bool) -> str:
    name = signal.Signals(signum).name
    if kind != "train":
        return f"Stopped by {name} before there were results: type the same again to begin anew"
    stands = any((folder / "checkpoints").glob("*.ckpt"))
    state = "its last checkpoint stands" if stands else "it has no checkpoint yet, and would begin anew"
    again = f"python -m project.train resume={shlex.quote(shorten(folder))}"
    return f"Stopped by {name}; {'its state is saved' if saved else state}. To go on: {again}"


def _grouped(keys: list[str]) -> str:
    """Dotted keys for people: ``data (num_workers, shuffle and 8 more), model (net)``.

    All of them with HYDRA_FULL_ERROR=1.
    """
    groups: dict[str, list[str]] = {}
    for key in keys:
        group, _, name = key.rpartition(".")
        groups.setdefault(group, []).append(name)
    most = len(keys) if full_tracebacks() else MOST_KEYS
    return ", ".join(f"{group} ({_first(names, most)})" for group, names in groups.items())


def _first(names: list[str], most: int) -> str:
    """So many of them and the number of the others, where that is shorter."""
    if len(names) <= most + 1:
        return ", ".join(names)
    return f"{', '.join(names[:most])} and {len(names) - most} more"


def _told(replaced: dict[str, str]) -> str:
    """The sentence on values that win over a class's defaults, which are the dict's values."""
    won, own = ", ".join(replaced), " ".join(replaced.values())
    if len(replaced) == 1:
        return f"The config's {won} wins over the class's own default: type {own} for that"
    return f"The config's {won} win over the classes' own defaults: type {own} for those"


def _plain(
    composed: DictConfig,
    overrides: list[str],
    run_dir: Path | None = None,
    tell: Callable[[str], object] | None = None,
) -> dict[str, Any]:
    """The config as plain data, every interpolation resolved; ``tell`` gets what differs from what was asked for."""
    if run_dir is not None:
        with open_dict(composed):
            composed.paths.run_dir = str(run_dir)
    config: dict[str, Any] = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)  # type: ignore[assignment]
    left_out = preflight.fit_to_targets(config, overrides)
    if left_out and tell is not None:
        tell(f"Left out of the config, because the classes that were put in don't take them: {_grouped(left_out)}")
    replaced = preflight.replaced_defaults(config, overrides)
    if replaced and tell is not None:
        tell(_told(replaced))
    preflight.check_complete(config)
    trainer = config["trainer"]
    trainer["strategy"] = strategy_names.resolve(trainer["strategy"])
    trainer["devices"] = devices.parse(trainer["devices"])
    if trainer["accelerator"] == "cpu" and not isinstance(trainer["devices"], int):
        trainer["devices"] = devices.count("cpu", trainer["devices"])  # Lightning counts CPU ranks, has no list of them
    return config


@contextmanager
def _opened_run(
    composed: DictConfig, overrides: list[str], kind: str, chosen: Path | None, started_at: float | None = None
) -> Iterator[tuple[dict[str, Any], Run]]:
    """Claim the run folder and keep it, write down what is run, and complete the config with the folder's name.

    A run that goes on (``resume=``, or a SLURM job that was requeued) has its folder already.
    """
    outputs = Path(composed.paths.outputs)
    in_sweep = chosen is not None
    tell = None if in_sweep else print  # a sweep has told it for all its jobs
    command = [kind, *overrides]
    again = requeue.remembered(outputs, command) if kind == "train" else None
    resumed = again or (Path(composed.resume) if composed.get("resume") else None)
    if chosen is None and composed.paths.run_dir is not None:
        chosen = Path(composed.paths.run_dir)
    made: list[Path] | None = None
    if resumed is not None:
        folder = resumed.resolve()
    elif chosen is not None:
        folder = run_folder.take(chosen)
    else:
        made = run_folder.missing(outputs / composed.name)
        folder = run_folder.claim(outputs / composed.name, "" if kind == "train" else f"{kind}_")
    with resume.held(folder), _taken_back(folder, made, in_sweep):
        environment = run_folder.describe_environment()
        config = resume.stored_config(folder) if again else _plain(composed, overrides, folder, tell)
        if again:
            config = unmasked(config, _plain(composed, overrides))
        if resumed is not None:
            before = resume.stored_overrides(folder)
            resume.take_up(folder, [] if again else overrides, environment["command"])
            typed = [] if again else [text for text in overrides if not text.startswith("resume=")]
            # A job of a sweep goes on by all that it began with.
            overrides = before if before[len(before) - len(typed) :] == typed else [*before, *typed]
        check_unmasked(config, "the run's config" if resumed else "the checkpoint's config")
        environment["signature"] = trust.signature(masked(config))
        run_folder.record(folder, config, overrides, environment)
        started_at = started_at or process_started_at()
        with requeue.noted(outputs, command, folder) if kind == "train" else nullcontext(), run_state.recorded(folder):
            yield config, Run(folder, masked_arguments(overrides), environment, started_at, resumes=resumed is not None)


def _taken_back(folder: Path, made: list[Path] | None, in_sweep: bool) -> AbstractContextManager[None]:
    """What becomes of a run's folder that a mistake ends before its first step; a sweep's tells why the job failed."""
    if in_sweep:
        return nullcontext()
    return run_folder.restored_if_refused(folder) if made is None else run_folder.removed_if_refused(folder, made)


def _complete_of_requeued(composed: DictConfig, overrides: list[str], kind: str) -> Outcome | None:
    """The outcome of this command in a requeued SLURM job that had come to its end before."""
    folder = requeue.remembered(Path(composed.paths.outputs), [kind, *overrides]) if kind == "train" else None
    if folder is None or not resume.is_complete(folder):
        return None
    print(f"The run in {shorten(folder)} is complete.", flush=True)
    return run_folder.read_metrics(folder)


def _run_here(function: str, config: dict[str, Any], run: Run, kind: str) -> Outcome:
    """Run as the only rank, in this process, and leave no trace in its environment."""
    import_for_ranks()

    def tell(error: BaseException) -> None:
        if not isinstance(error, KeyboardInterrupt | Stopped):
            print(error, file=sys.stderr, flush=True)
        with run_state.recorded(run.folder, begins=False), _stop_told(run, kind):
            raise error

    with (
        rank.environment_restored(),
        listening(insistent=True),
        rank_log(run.folder, 0, own_console=True),
        watchdog.watched(config["launch"], run.folder / "ranks" / "rank_0.log", tell),
    ):
        cpu.settle(config, local_world_size=1)
        try:
            with rank.faults_explained(config, 1):
                return rank.load(function)(config, run)
        except SystemExit as error:
            # Lightning answers Ctrl-C with its own exit; here it is what it was.
            if isinstance(error.__context__, KeyboardInterrupt):
                raise KeyboardInterrupt from None
            raise


def _run_as_rank(
    function: str, composed: DictConfig, overrides: list[str], kind: str, launcher: str, chosen: Path | None
) -> Outcome:
    """Run as one of the ranks that torchrun or SLURM started; rank 0 claims the folder and tells the others."""
    import_for_ranks()
    import torch.distributed as dist
    from torch.distributed.elastic.multiprocessing.errors import record

    config = _plain(composed, overrides)
    environment = rank.cluster_environment()
    if not is_single_process(config["trainer"]["strategy"]):
        _check_world(config, environment.world_size(), launcher)
    elif environment.world_size() > 1:
        raise UserError(
            f"this strategy drives all devices from one process, and {launcher} started {environment.world_size()}: "
            "type trainer/strategy=ddp, or start the command without it"
        )
    if kind == "train":
        world_size = environment.world_size()
        strategy_config, local_world_size = config["trainer"]["strategy"], devices.local_world_size()
        shares = world_size // ranks_per_batch(strategy_config, local_world_size)
        preflight.check_batch_size(config, shares, pipeline_layout(strategy_config, local_world_size))
    cpu.settle(config, devices.local_world_size())
    with rank.environment_restored(), rank.process_group(config), ExitStack() as stack:
        me = environment.global_rank()
        told: list[Any] = [None]
        if me == 0:
            try:
                told = [stack.enter_context(_opened_run(composed, overrides, kind, chosen))]
            except UserError as error:
                told = [error]
        if environment.world_size() > 1:
            dist.broadcast_object_list(told, src=0)
        if isinstance(told[0], UserError):
            raise told[0]
        config, run = told[0]
        # torchrun starts all ranks again when one dies.
        restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        run = replace(run, rank=me, world_size=environment.world_size(), resumes=run.resumes or restarted)
        if me > 0:
            stack.enter_context(run_state.recorded(run.folder, begins=False))
        stack.enter_context(_stop_told(run, kind))
        stack.enter_context(listening())
        if run.world_size > devices.local_world_size():
            stack.enter_context(
                host_watchdog.watched(
                    environment.main_address,
                    me,
                    environment.local_rank(),
                    config["launch"]["host_timeout_s"],
                    run.folder,
                )
            )
        with rank_log(run.folder, me, own_console=me == 0, tell_errors=launcher == "slurm"):
            rank.dump_stacks_when_asked(run.folder, me)
            if me == 0 and chosen is None:
                announce(kind, config, run, run.world_size, run.world_size)
            with rank.faults_explained(config, run.world_size):
                # torchrun shows the first error that is recorded for it.
                outcome = record(rank.load(function))(config, run)
            assert outcome is not None
            if me == 0 and chosen is None:
                summarize(kind, config, run, outcome)
    return outcome


def _check_world(config: dict[str, Any], world_size: int, launcher: str) -> None:
    """Devices and hosts of the config must be what the launcher started."""
    trainer = config["trainer"]
    num_nodes = trainer["num_nodes"]
    if trainer["devices"] == "auto" or trainer["devices"] == -1:
        trainer["devices"] = world_size // num_nodes
    per_host = len(trainer["devices"]) if isinstance(trainer["devices"], list) else trainer["devices"]
    if per_host * num_nodes != world_size:
        raise UserError(
            f"{launcher} started {world_size} ranks, but trainer.devices={per_host} on trainer.num_nodes={num_nodes} "
            f"makes {per_host * num_nodes}: type trainer.devices={max(1, world_size // num_nodes)}"
        )
