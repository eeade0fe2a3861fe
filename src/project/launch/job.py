"""One job: from a composed config to its outcome, on as many ranks as the config says."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from omegaconf import DictConfig, OmegaConf, open_dict

from project.errors import UserError
from project.launch import agent, combinations, devices, preflight, rank, run_folder, strategy
from project.launch.run import Outcome, Run
from project.launch.summary import announce, summarize
from project.strategies import is_single_process, pipeline_layout, ranks_per_batch


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
    if composed.get("seed", 0) is None:
        composed.seed = random.SystemRandom().randrange(2**32)

    config = _plain(composed, overrides)
    preflight.check(config)
    combinations.check(config)
    launcher = devices.started_by()
    if launcher:
        return _run_as_rank(function, composed, overrides, kind, launcher)
    trainer = config["trainer"]
    one_process = is_single_process(trainer["strategy"])
    if trainer["num_nodes"] > 1 and not one_process:
        raise UserError(
            f"trainer.num_nodes={trainer['num_nodes']}: several hosts are started by torchrun or SLURM: type "
            "torchrun --nnodes N --nproc-per-node M -m project.train ..., or trainer.num_nodes=1"
        )
    if in_sweep or not (one_process or trainer["devices"] == 1):
        agent.warm_up()  # imports on another core while this process goes on
    num_devices = devices.count(trainer["accelerator"], trainer["devices"])
    num_ranks = 1 if one_process else num_devices
    batch_shares = num_ranks // ranks_per_batch(trainer["strategy"], num_ranks)
    if kind == "train":  # evaluation shares any number of samples out
        preflight.check_batch_size(config, batch_shares, pipeline_layout(trainer["strategy"], num_ranks))

    config, run = _open_run(composed, overrides, kind, sweep_folder)
    run = replace(run, started_at=started_at or run.started_at)
    announce(kind, config, run, num_ranks, num_devices)
    # A job of a sweep gets a process of its own even when it is alone: nothing leaks from job to job.
    if num_ranks == 1 and not in_sweep:
        outcome = _run_here(function, config, run)
    else:
        outcome = agent.run_ranks(function, config, run, num_ranks)
    summarize(kind, config, run, outcome)
    return outcome


def _plain(composed: DictConfig, overrides: list[str], run_dir: Path | None = None) -> dict[str, Any]:
    """The config as plain data, every interpolation resolved."""
    if run_dir is not None:
        with open_dict(composed):
            composed.paths.run_dir = str(run_dir)
    config: dict[str, Any] = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)  # type: ignore[assignment]
    left_out = preflight.fit_to_targets(config, overrides)
    if left_out and run_dir is not None:
        print(f"Left out, because the classes that were put in don't take them: {', '.join(left_out)}")
    preflight.check_complete(config)
    trainer = config["trainer"]
    trainer["strategy"] = strategy.resolve(trainer["strategy"])
    trainer["devices"] = devices.parse(trainer["devices"])
    if trainer["accelerator"] == "cpu" and not isinstance(trainer["devices"], int):
        trainer["devices"] = devices.count("cpu", trainer["devices"])  # Lightning counts CPU ranks, has no list of them
    return config


def _open_run(composed: DictConfig, overrides: list[str], kind: str, chosen: Path | None) -> tuple[dict[str, Any], Run]:
    """Claim the run folder, write down what is run, and complete the config with the folder's name."""
    if chosen is None and composed.paths.run_dir is not None:
        chosen = Path(composed.paths.run_dir)
    if chosen is not None:
        folder = run_folder.take(chosen)
    else:
        prefix = "" if kind == "train" else f"{kind}_"
        folder = run_folder.claim(Path(composed.paths.outputs) / composed.name, prefix)
    config = _plain(composed, overrides, folder)
    environment = run_folder.describe_environment()
    run_folder.record(folder, config, overrides, environment)
    return config, Run(folder, overrides, environment, psutil.Process().create_time())


def _run_here(function: str, config: dict[str, Any], run: Run) -> Outcome:
    """Run as the only rank, in this process, and leave no trace in its environment."""
    with rank.environment_restored(), rank.rank_log(run.folder, 0, own_console=True):
        rank.share_threads(config["launch"]["threads_per_rank"], local_world_size=1)
        try:
            return rank.load(function)(config, run)
        except SystemExit as error:
            # Lightning answers Ctrl-C with its own exit; here it is what it was.
            if isinstance(error.__context__, KeyboardInterrupt):
                raise KeyboardInterrupt from None
            raise


def _run_as_rank(function: str, composed: DictConfig, overrides: list[str], kind: str, launcher: str) -> Outcome:
    """Run as one of the ranks that torchrun or SLURM started; rank 0 claims the folder and tells the others."""
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
    rank.share_threads(config["launch"]["threads_per_rank"], devices.local_world_size())
    with rank.environment_restored(), rank.process_group(config):
        me = environment.global_rank()
        told: list[Any] = [None]
        if me == 0:
            try:
                told = [_open_run(composed, overrides, kind, None)]
            except UserError as error:
                told = [error]
        if environment.world_size() > 1:
            dist.broadcast_object_list(told, src=0)
        if isinstance(told[0], UserError):
            raise told[0]
        config, run = told[0]
        run = replace(run, rank=me, world_size=environment.world_size())
        with rank.rank_log(run.folder, me, own_console=me == 0, tell_errors=launcher == "slurm"):
            if me == 0:
                announce(kind, config, run, run.world_size, run.world_size)
            # torchrun shows the first error that is recorded for it.
            outcome = record(rank.load(function))(config, run)
            assert outcome is not None
            if me == 0:
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
