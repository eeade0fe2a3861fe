"""The command line that all commands share: Hydra's, with errors told in a sentence."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf

from project import cpu
from project.config.composition import (
    check_choices,
    check_folders,
    config_folder,
    explain,
    name_after_own_class,
    register_resolvers,
    take_experiment_file,
)
from project.errors import FULL_ERROR, full_tracebacks, sentence
from project.launch import devices, early_interrupt, hidden_modules, usage
from project.launch.console import lasting_console
from project.launch.prestart import Server
from project.launch.run import Outcome
from project.launch.run_folder import CLAIMED
from project.launch.stopping import TOLD
from project.sweep.plugins import ask_for_several_jobs, go_on_with_sweep, register_plugins

PATIENCE_S = 20
LONGEST = 70  # of a temporary folder's path, to which multiprocessing adds up to 34 characters

Prepare = Callable[[str, list[str]], str]
Job = Callable[[str, DictConfig, list[str], str, Path | None], Outcome]


def command(
    name: str, function: Callable[..., Any], prepare: Prepare | None = None, job: Job | None = None
) -> Callable[[], None]:
    """The entry point of a command that runs ``function`` on every rank with ``conf/<name>.yaml``.

    ``prepare(name, arguments)`` may rewrite the command line, and says which config to compose instead. ``job`` runs
    the function in another way than ``run_job``.
    """
    # The function may come from __main__ (python -m project.train); the ranks import it by its real name.
    path = f"{__name__.partition('.')[0]}.{name}:{function.__name__}"
    doc = function.__globals__["__doc__"]

    def main() -> None:
        sys.exit(run(name, path, prepare, job, doc))

    return main


def run(
    name: str, function: str, prepare: Prepare | None = None, job: Job | None = None, doc: str | None = None
) -> int:
    """Run a command with the arguments of this process; its exit code. ``doc`` is what its help begins with."""
    try:
        early_interrupt.end()
        with lasting_console():
            return _run(name, function, prepare, job, doc)
    except KeyboardInterrupt as error:
        if error.args != (TOLD,) and _is_first_rank():
            print(f"\n{_after_interrupt(sys.argv)}", file=sys.stderr)
        return 130


def _run(name: str, function: str, prepare: Prepare | None, job: Job | None, doc: str | None) -> int:
    wants_traceback = full_tracebacks()
    try:
        folder = str(Path.cwd())
    except FileNotFoundError:
        print("error: the working directory has been deleted: type cd with a folder that is there", file=sys.stderr)
        return 1
    if folder not in sys.path:
        sys.path.insert(0, folder)  # a console script has its own folder there, not the user's
    _keep_sockets_short()
    cores_at_start = cpu.CoresTaken.until_now()
    server = Server(sys.argv if name == "train" else [])
    register_resolvers()
    config_name = name
    failed: list[Exception] = []
    try:
        # With this set, Hydra raises what went wrong instead of printing it.
        os.environ[FULL_ERROR] = "1"
        devices.check_environment()
        flags_first(sys.argv)
        if name == "train":
            go_on_with_sweep(sys.argv)
        config_name = prepare(name, sys.argv) if prepare else name
        _complete_and_check(sys.argv, name)
        if usage.is_asked_for(sys.argv):
            print(usage.help_text(doc, config_name, sys.argv), flush=True)
            return 0

        def task(composed: DictConfig) -> float | None:
            if server.pid != os.getpid():  # else it has looked for the ranks
                cpu.choose_waiting(cores_at_start)
            if not wants_traceback:
                os.environ.pop(FULL_ERROR, None)
            try:
                return _run_composed(composed, name, function, job, failed)
            finally:
                os.environ[FULL_ERROR] = "1"

        hydra.main(config_path=str(config_folder()), config_name=config_name, version_base="1.3")(task)()
        if failed:
            raise failed[0]
    except Exception as error:
        return _tell(error, config_name, wants_traceback)
    finally:
        server.end()
    return 0


def _complete_and_check(arguments: list[str], name: str) -> None:
    """Say in the arguments what follows from them, and refuse what Hydra would not explain."""
    register_plugins()
    ask_for_several_jobs(arguments)
    take_experiment_file(arguments)
    if name == "train":
        name_after_own_class(arguments)
    check_choices(arguments)
    check_folders(arguments)


def _run_composed(
    composed: DictConfig, name: str, function: str, job: Job | None, failed: list[Exception]
) -> float | None:
    """One job, of a sweep or alone; the value that a search optimizes. What fails alone is added to ``failed``."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from project.launch.job import run_job
    from project.launch.run_state import record_failure

    hydra_config = HydraConfig.get()
    in_sweep = hydra_config.mode == RunMode.MULTIRUN
    folder = Path(hydra_config.runtime.output_dir) if in_sweep else None
    if in_sweep:
        OmegaConf.update(composed, "sweep.job", hydra_config.sweeper.get("job"), force_add=True)
    try:
        if not in_sweep:
            check_folders(hydra_config.overrides.hydra, ("hydra.sweep.dir", "hydra.sweep.subdir"))
        with _gpus(composed, str(hydra_config.launcher._target_), in_sweep):
            return (job or run_job)(function, composed, list(hydra_config.overrides.task), name, folder).objective
    except Exception as error:
        if folder is not None:
            record_failure(folder, error)
            raise  # Hydra notes the failed job and goes on with the next
        failed.append(error)
        return None


def _keep_sockets_short() -> None:
    """Sockets of ranks and workers lie in the temporary folder, and Linux takes no path of 108 characters for one."""
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if os.name == "posix" and len(tempfile.gettempdir()) > LONGEST and "tempdir" not in config:
        config["tempdir"] = tempfile.mkdtemp(prefix="pymp-", dir="/tmp")
        atexit.register(shutil.rmtree, config["tempdir"], ignore_errors=True)


def _gpus(composed: DictConfig, launcher: str, in_sweep: bool) -> AbstractContextManager[None]:
    """Where joblib runs several jobs at once: GPUs of this one's own."""
    if not in_sweep or not launcher.endswith(".JoblibLauncher") or devices.started_by():
        return nullcontext()
    from project.sweep.gpu_slots import own_gpus

    return own_gpus(composed)


def flags_first(arguments: list[str]) -> None:
    """Put ``-m`` before the overrides: in their middle, Hydra's parser does not know those behind it."""
    flags = [argument for argument in arguments[1:] if argument in ("-m", "--multirun")]
    arguments[1:] = flags + [argument for argument in arguments[1:] if argument not in flags]


def _tell(error: Exception, config_name: str, wants_traceback: bool) -> int:
    text = sentence(error) or explain(error, config_name, sys.argv[1:])
    if text is None and type(error).__name__ == "RankError":
        text = str(error)  # the rank's own traceback
    if wants_traceback or text is None:
        traceback.print_exception(error)
        if hint := hidden_modules.told(error):
            print(f"error: {hint}", file=sys.stderr)
    elif _is_told_here():
        print(f"error: {text}", file=sys.stderr)
    return 1


def _is_told_here() -> bool:
    """Once for all ranks, by the first; of torchrun's by another where the first goes on.

    torchrun ends all ranks as soon as one has ended: the others wait for the first, which may come later, to tell it.
    """
    if _is_first_rank():
        return True
    if devices.started_by() != "torchrun":
        return False
    time.sleep(PATIENCE_S)
    return True


def _is_first_rank() -> bool:
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


def _after_interrupt(arguments: list[str]) -> str:
    """What is left of a command that Ctrl-C ended outside of a run."""
    standing = [folder for folder in CLAIMED if folder.exists()]
    if standing:
        from project.launch.summary import shorten

        return f"Interrupted; what was written so far is in {shorten(standing[0])}."
    if {"-m", "--multirun"} & set(arguments):
        return "Interrupted."  # a sweep that goes on has its folder already, and says how to go on with it
    return early_interrupt.NOTHING_WRITTEN
