"""From one command to many jobs: Hydra's sweepers of this project."""

from __future__ import annotations

import importlib.util
import os
import random
import shlex
import sys
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobStatus
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from project.config.composition import check_job_folders, experiment_file
from project.config.preflight import extra_of
from project.errors import FULL_ERROR, UserError
from project.launch import agent, run_folder, run_state
from project.launch.summary import shorten
from project.sweep.jobs import Job, all_combinations, quote
from project.sweep.preflight import DECIDES, check_compared, check_each, check_jobs
from project.sweep.progress import Progress
from project.sweep.record import FILE as SWEEP_FILE
from project.sweep.record import Sweep, read
from project.sweep.results import rows_of

KEPT = 100  # composed configs
PREFIX = "hydra_plugins.own"  # of our classes, in Hydra's register


class FolderSweeper(Sweeper):
    """What a grid and a search share: jobs that write their results to folders, where they are found again.

    A job that fails is noted and the others run. At the end the sweep's folder has its report, and a sweep with
    failed jobs raises.
    """

    def __init__(self, job: DictConfig) -> None:
        self.job = job  # of hydra.sweeper.job: empty here, filled for each job
        self.config: DictConfig
        self.composer: Composer
        self.hydra_context: HydraContext
        self.task_function: TaskFunction
        self.launcher: Launcher | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.composer = Composer(hydra_context.config_loader)
        loader: Any = self.composer
        self.hydra_context = HydraContext(config_loader=loader, callbacks=hydra_context.callbacks)
        self.task_function, self.config = task_function, config

    def sweep(self, arguments: list[str]) -> None:
        """Run all jobs of what was typed.

        Raises:
            UserError: the sweep can't begin, or jobs failed: then each is named with its reason.
        """
        check_job_folders(self.config.hydra.overrides.hydra)
        _check_installed(self.config.hydra.launcher._target_, self.config.hydra.runtime.choices["hydra/launcher"])
        if self.config.hydra.launcher._target_.endswith(".BasicLauncher"):
            with _errors_told_shortly():
                agent.warm_up()  # the server that the ranks are forked from imports while the jobs are composed here
        fixed, sweeps = self._split(arguments)
        check_compared(sweeps, self.settings.get("objectives"))
        with _errors_told_shortly():
            check_jobs(self.composer.loader, self.config, fixed, sweeps)
        made = run_folder.missing(Path(self.config.paths.outputs) / self.config.name)
        record = self.begin(fixed, sweeps)
        record.fixed, record.typed = fixed, [*arguments, *_typed_for_hydra(self.config)]
        if (name := self.config.hydra.runtime.choices.get("experiment")) is not None:
            record.experiment = experiment_file(name)
        if self.config.get("seed", 0) is None and not any(sweep.key_or_group == "seed" for sweep in sweeps):
            if record.seed is None:
                record.seed = random.SystemRandom().randrange(2**32)
            record.fixed = [*fixed, f"seed={record.seed}"]  # seeds differ only where the sweep says so
        begun = {job.number for job in record.jobs}
        try:
            self.run_all(record, sweeps)
        except BaseException:
            if record.jobs:
                folder = shlex.quote(shorten(record.folder))
                print(f"To go on with the sweep: python -m project.train resume={folder}", file=sys.stderr)
            else:
                _remove_empty([record.folder, *made])
            raise
        finally:
            if record.jobs:
                from project.sweep.report import write_report

                write_report(record)
        failed = [row for row in rows_of(record) if row.number not in begun and row.error]
        if failed:
            lines = [f"  {shorten(row.folder)}: {row.error}" for row in failed]
            ran = len(record.jobs) - len(begun)
            raise UserError("\n".join([f"{len(failed)} of {ran} jobs of the sweep failed:", *lines]))

    @abstractmethod
    def begin(self, fixed: list[str], sweeps: list[Override]) -> Sweep:
        """The sweep's folder and what is known of it so far."""

    @abstractmethod
    def run_all(self, record: Sweep, sweeps: list[Override]) -> None:
        """Run what is left of the sweep."""

    @property
    def settings(self) -> DictConfig:
        """The config group ``sweep``; empty for commands without it."""
        found: DictConfig = self.config.get("sweep") or OmegaConf.create()
        return found

    def objectives(self) -> dict[str, str]:
        """What the sweep compares: ``{metric: "min" or "max"}``; empty where the command monitors nothing.

        Raises:
            UserError: a direction is neither.
        """
        given = {str(name): str(direction) for name, direction in (self.settings.get("objectives") or {}).items()}
        if not given and self.config.get("monitor"):
            given = {self.config.monitor: self.config.mode}
        for name, direction in given.items():
            if direction not in ("min", "max"):
                raise UserError(f"sweep.objectives: {name}={direction} can't be: type {{{name}:min}} or {{{name}:max}}")
        return given

    def by_monitor(self, sweeps: list[Override]) -> bool:
        """Whether that is what the jobs monitor."""
        decided = any(sweep.key_or_group in DECIDES for sweep in sweeps)
        return not decided and self.objectives() == {self.config.get("monitor"): self.config.get("mode")}

    def run(self, record: Sweep, jobs: list[tuple[Job, list[str]]]) -> None:
        """Hand jobs with their overrides to the launcher and wait. What they came to stands in their folders then."""
        record.jobs += [job for job, _ in jobs]
        record.write()
        launcher = self._launcher(record.folder)
        try:
            returned = launcher.launch([overrides for _, overrides in jobs], initial_job_idx=jobs[0][0].number)
        except UserError:
            raise  # the launcher refuses to run any
        except Exception as error:  # of the launcher: a job's own is returned
            for job, _ in jobs:
                run_state.record_failure(job.folder, error)
            return
        for (job, _), result in zip(jobs, returned, strict=True):
            if result.status == JobStatus.FAILED:
                run_state.record_failure(job.folder, result._return_value)
            elif run_state.read(job.folder) is None:  # of a command that keeps no state of its runs
                run_state.record_success(job.folder)

    def _split(self, arguments: list[str]) -> tuple[list[str], list[Override]]:
        """Overrides that all jobs share as typed, and those of several values; what is typed wins over the config."""
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        params = self.settings.get("params") or {}
        lines = [f"{key}={_as_typed(value)}" for key, value in params.items()]
        found = {override.get_key_element(): override for override in parser.parse_overrides(lines)}
        found |= {override.get_key_element(): override for override in parser.parse_overrides(arguments)}
        fixed = [str(override.input_line) for override in found.values() if not override.is_sweep_override()]
        sweeps = [override for override in found.values() if override.is_sweep_override()]
        return fixed, sweeps

    def _launcher(self, folder: Path) -> Launcher:
        if self.launcher is None:
            with open_dict(self.config):
                self.config.hydra.sweep.dir = str(folder)
            self.launcher = Plugins.instance().instantiate_launcher(
                hydra_context=self.hydra_context, task_function=self.task_function, config=self.config
            )
        return self.launcher


class GridSweeper(FolderSweeper):
    """Every combination of the values; or, where it ``goes_on``, those of an earlier start that have not finished."""

    def __init__(self, job: DictConfig, goes_on: bool = False) -> None:
        super().__init__(job)
        self.goes_on = goes_on

    def begin(self, fixed: list[str], sweeps: list[Override]) -> Sweep:
        """Claim a folder, or take up the sweep that is there."""
        total = len(all_combinations(sweeps))
        folder = Path(self.config.hydra.sweep.dir)
        if self.goes_on:
            return _unfinished(folder)
        if (folder / SWEEP_FILE).exists():
            raise UserError(
                f"{folder} holds a sweep already: type resume={folder} to go on with it, another hydra.sweep.dir, or "
                "leave it out"
            )
        folder.mkdir(parents=True, exist_ok=True)
        by_monitor = self.by_monitor(sweeps)
        return Sweep(folder.resolve(), "grid", self.objectives(), fixed, total, by_monitor=by_monitor)

    def run_all(self, record: Sweep, sweeps: list[Override]) -> None:
        """Hand all jobs to the launcher at once, if every one of them composes."""
        jobs = [Job.of(number, chosen, record.folder) for number, chosen in enumerate(all_combinations(sweeps))]
        done = {job.number for job in record.jobs}
        planned = [(job, job.overrides(record.fixed) + _resume(job)) for job in jobs if job.number not in done]
        monitored: set[str] = set()

        def composed() -> Iterator[tuple[str, DictConfig]]:
            for job, overrides in planned:
                one = self.composer.compose(self.config, overrides)
                monitored.add(f"{one.get('monitor')} {one.get('mode')}")
                yield job.name, one

        with _errors_told_shortly():
            check_each(self.config, composed())
        self._compare_alike(record, monitored)
        if not planned:
            print(f"All {len(done)} jobs of the sweep are finished.", flush=True)
            return
        print(f"sweep in {shorten(record.folder)}", flush=True)
        for job, _ in planned:
            (job.folder / run_state.FILE).unlink(missing_ok=True)  # how it ended before is not how it will
        with Progress(record):
            self.run(record, planned)

    def _compare_alike(self, record: Sweep, monitored: set[str]) -> None:
        """Compare jobs that monitor different metrics, as experiments may, by ``sweep.objectives`` or not at all."""
        if len(monitored) < 2:
            return
        record.by_monitor = False
        if not self.settings.get("objectives"):
            record.objectives = {}
            print(
                f"The jobs do not monitor the same ({', '.join(sorted(monitored))}), so none of them will be called "
                "the best: type 'sweep.objectives={METRIC:max}' to compare them by one that all have",
                flush=True,
            )


class Composer:
    """Hydra's config loader, which keeps what it has composed for the launcher that asks for the same.

    Each job is composed before it is handed out, so that an error shows at once; composing takes a good part of the
    time that a small job costs. What is kept does not travel to other processes.
    """

    def __init__(self, loader: ConfigLoader) -> None:
        self.loader = loader
        self._kept: dict[tuple[str, ...], DictConfig] = {}

    def compose(self, master: DictConfig, overrides: Sequence[str]) -> DictConfig:
        """Compose a job's config and keep it, within bounds; it is there to be read."""
        composed = self.loader.load_sweep_config(master, list(overrides))
        if len(self._kept) < KEPT:
            self._kept[tuple(overrides)] = composed
        return composed

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: Sequence[str]) -> DictConfig:
        """What Hydra's loader returns; each kept config goes to one caller, who may change it."""
        kept = self._kept.pop(tuple(sweep_overrides), None)
        return self.loader.load_sweep_config(master_config, list(sweep_overrides)) if kept is None else kept

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not yet there while this is unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __getstate__(self) -> dict[str, Any]:
        return {"loader": self.loader, "_kept": {}}


def _remove_empty(folders: Iterable[Path]) -> None:
    for folder in folders:
        with suppress(OSError):  # it holds something
            folder.rmdir()


def _unfinished(folder: Path) -> Sweep:
    """The grid in a folder as if only its finished jobs had begun.

    Raises:
        UserError: a job is running.
    """
    record = read(folder)
    rows = rows_of(record)
    if running := [row for row in rows if row.state == "running"]:
        raise UserError(f"{running[0].folder} is running: wait for its end, or stop it")
    done = {row.number for row in rows if row.state == "finished"}
    record.jobs = [job for job in record.jobs if job.number in done]
    return record


def _resume(job: Job) -> list[str]:
    """What lets a job go on that began before, from its last checkpoint if it has one."""
    return [f"resume={quote(str(job.folder))}"] if job.folder.exists() else []


def _typed_for_hydra(config: DictConfig) -> list[str]:
    """Overrides of Hydra's own settings, but for the mode, and those by which a sweep goes on."""
    ours = ("hydra.mode=", "hydra.sweep.dir=", "hydra.sweeper.goes_on=")
    return [text for text in config.hydra.overrides.hydra if not text.startswith(ours)]


@contextmanager
def _errors_told_shortly() -> Iterator[None]:
    """HYDRA_FULL_ERROR is set for Hydra, which raises errors then, and not for ranks and checks."""
    ours = os.environ.pop(FULL_ERROR, None)
    try:
        yield
    finally:
        if ours is not None:
            os.environ[FULL_ERROR] = ours


def _as_typed(value: Any) -> str:
    """A value of ``sweep.params``: a text is taken as it is, a list for the values to choose from."""
    if OmegaConf.is_list(value):
        return f"choice({','.join(map(_as_typed, value))})"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _check_installed(target: str, choice: str) -> None:
    """A launcher's plugin must be there; ours lean on that of another distribution."""
    package = {
        f"{PREFIX}.SlurmLauncher": "hydra_plugins.hydra_submitit_launcher",
        f"{PREFIX}.RayLauncher": "hydra_plugins.hydra_ray_launcher",
    }.get(target, ".".join(target.split(".")[:2]))
    if package.startswith("hydra_plugins.") and (
        importlib.util.find_spec("hydra_plugins") is None or importlib.util.find_spec(package) is None
    ):
        name = package.partition(".")[2]
        raise UserError(
            f"hydra/launcher={choice} needs the package {name}, which is not installed: type "
            f'pip install "project[{extra_of(name) or name}]"'
        )
