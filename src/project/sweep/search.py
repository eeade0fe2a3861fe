"""A search: an Optuna study whose trials are jobs of a sweep."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from project.config.composition import explain
from project.errors import UserError
from project.launch import run_state
from project.launch.summary import shorten
from project.sweep import record as records
from project.sweep.jobs import Job, quote
from project.sweep.progress import Progress
from project.sweep.record import Sweep
from project.sweep.results import row_of
from project.sweep.space import space_of, value_as_typed
from project.sweep.study import check_storage
from project.sweep.sweeper import FolderSweeper

if TYPE_CHECKING:
    import optuna
    from optuna.samplers import BaseSampler

    from project.sweep.space import Space

# How a study goes on may differ from how it began; what it searches may not.
NOT_SEARCHED = ("sweep.n_trials", "sweep.n_jobs", "sweep.study")
SEARCHED = "searched"
SOURCES = "sources"


class OptunaSweeper(FolderSweeper):
    """Trials that Optuna proposes, some at a time; all is decided here, once, and every rank is told the same.

    The same command goes on with the same study: trials that were running when it was killed are marked failed and
    proposed again.
    """

    def begin(self, fixed: list[str], sweeps: list[Override]) -> Sweep:
        """The study's folder, with what earlier starts left there."""
        if not sweeps:
            raise UserError(
                "sweep=optuna has nothing to search: type values to choose from, as in "
                "'optimizer.lr=tag(log, interval(1e-4, 1e-1))' model.net.width=64,128, or write them in sweep.params"
            )
        for key in ("n_trials", "n_jobs"):
            value = self.settings[key]
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UserError(f"sweep.{key}={value} can't be: type a whole number from 1")
        if not self.objectives():
            raise UserError("sweep=optuna needs something to compare: type monitor=METRIC, or sweep.objectives")
        space = space_of(sweeps)  # refuses what can't be searched before there is a folder, as do the next
        self._sampler(space, trials_before=0)
        check_storage(str(self.settings.storage))
        searched = [
            *sorted(text for text in fixed if not text.lstrip("+").startswith(NOT_SEARCHED)),
            *sorted(str(sweep.input_line) for sweep in sweeps),
        ]
        folder = self._folder(searched)
        try:
            return records.read(folder)
        except UserError:
            by_monitor = self.by_monitor(sweeps)
            return Sweep(folder, "optuna", self.objectives(), fixed, total=0, by_monitor=by_monitor)

    def run_all(self, record: Sweep, sweeps: list[Override]) -> None:
        """Ask, launch and tell until the study has its trials."""
        from optuna.trial import TrialState

        from project.sweep.study import alone

        print(f"sweep in {shorten(record.folder)}", flush=True)
        with alone(record.folder):
            space = space_of(sweeps)
            study = self._study(record, sweeps)
            _mark_killed(study)
            over = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))
            left = max(0, self._num_trials(space) - len(over))
            record.total = len(record.jobs) + left
            if not left:
                more = f"type sweep.n_trials=N for more, or {self._anew} to search anew"
                print(f"{len(over)} trials are finished: {more}", flush=True)
            with Progress(record):
                while left > 0:
                    trials = [study.ask(space) for _ in range(min(self.settings.n_jobs, left))]
                    left -= len(trials)
                    self._run_trials(record, study, trials)

    def _run_trials(self, record: Sweep, study: optuna.Study, trials: Sequence[optuna.Trial]) -> None:
        from optuna.trial import TrialState

        jobs = [
            Job.of(trial.number, {key: value_as_typed(v) for key, v in trial.params.items()}, record.folder)
            for trial in trials
        ]
        storage = str(self.settings.storage)
        told = {"folder": quote(str(record.folder)), "study": quote(study.study_name), "storage": quote(storage)}
        planned = [(job, job.overrides(record.fixed, told | {"trial": str(job.number)})) for job in jobs]
        composed = [(job, overrides) for job, overrides in planned if self._composes(record, job, overrides)]
        if composed:
            self.run(record, composed)
        for job in jobs:
            result = row_of(job, record)
            if result.counts:
                study.tell(job.number, [float(value) for value in result.objectives if value is not None])
            elif result.state == "pruned":
                study.tell(job.number, state=TrialState.PRUNED)
            else:
                study.tell(job.number, state=TrialState.FAIL)

    def _composes(self, record: Sweep, job: Job, overrides: list[str]) -> bool:
        """Whether Hydra can compose the job, and it can be compared with others; if not, it has failed."""
        try:
            composed = self.composer.compose(self.config, overrides)
            _check_monitor(record, composed.get("monitor"), composed.get("mode"))
        except Exception as error:
            text = explain(error, self.config.hydra.job.config_name)
            run_state.record_failure(job.folder, UserError(text) if text else error)
            record.jobs.append(job)
            return False
        return True

    def _study(self, record: Sweep, sweeps: list[Override]) -> optuna.Study:
        import optuna
        from optuna.trial import TrialState

        from project.sweep.study import open_storage, source_digests

        storage = open_storage(str(self.settings.storage), record.folder)
        of = {"min": optuna.study.StudyDirection.MINIMIZE, "max": optuna.study.StudyDirection.MAXIMIZE}
        directions = [of[direction] for direction in record.objectives.values()]
        study = optuna.create_study(
            storage=storage, study_name=record.folder.name, directions=directions, load_if_exists=True
        )
        searched = json.dumps(sorted(str(sweep.input_line) for sweep in sweeps))
        known = study.user_attrs.get(SEARCHED, searched)
        if known != searched:
            raise UserError(
                f"the study {study.study_name} searches {', '.join(json.loads(known))}, and not "
                f"{', '.join(json.loads(searched))}: type these, or sweep.study=ANOTHER_NAME"
            )
        study.set_user_attr(SEARCHED, searched)
        sources = source_digests(self.config)
        counted = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))
        began_with = study.user_attrs.get(SOURCES) if counted else None
        if began_with is None:  # or no trial counts yet, as before a mistake in the code was mended
            study.set_user_attr(SOURCES, sources)
        elif changed := [target for target, digest in sources.items() if began_with.get(target) != digest]:
            print(
                f"The code of {', '.join(changed)} has changed since the study began, and earlier trials are of the "
                f"old code: type {self._anew} to search anew",
                flush=True,
            )
        study.sampler = self._sampler(space_of(sweeps), len(study.get_trials(deepcopy=False)))
        return study

    def _sampler(self, space: Space, trials_before: int) -> BaseSampler:
        from project.sweep.study import build_sampler

        sampler: Any = OmegaConf.to_container(self.settings.sampler, resolve=True)
        return build_sampler(sampler, space, trials_before)

    @property
    def _is_folder_typed(self) -> bool:
        return any(text.startswith("hydra.sweep.dir=") for text in self.config.hydra.overrides.hydra)

    @property
    def _anew(self) -> str:
        """What to type for a study of its own."""
        return "another hydra.sweep.dir=FOLDER" if self._is_folder_typed else "sweep.study=NAME"

    def _folder(self, searched: list[str]) -> Path:
        """Where the study is: named by the user, or after what it searches."""
        if self._is_folder_typed:
            folder = Path(self.config.hydra.sweep.dir)
        else:
            name = self.settings.study or f"search_{hashlib.sha256(json.dumps(searched).encode()).hexdigest()[:8]}"
            folder = Path(self.config.paths.outputs) / self.config.name / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"the folder {folder} can't be created ({error.strerror}): type paths.outputs=FOLDER"
            ) from error
        return folder.resolve()

    def _num_trials(self, space: Any) -> int:
        from project.sweep.space import grid_of

        if self.settings.sampler._target_ == "optuna.samplers.GridSampler":
            return math.prod(len(values) for values in grid_of(space).values())
        return int(self.settings.n_trials)


def _check_monitor(record: Sweep, monitor: str | None, mode: str | None) -> None:
    """Check that a trial monitors what the search compares, which its experiment may have changed.

    Raises:
        UserError: it does not.
    """
    if record.by_monitor and record.objectives != {monitor: mode}:
        name, direction = next(iter(record.objectives.items()))
        raise UserError(
            f"it monitors {monitor} {mode}, and the search compares {name} {direction}: type 'sweep.objectives="
            "{METRIC:max}' with one that all have"
        )


def _mark_killed(study: optuna.Study) -> None:
    """Trials that nobody runs any more, since this process holds the study: failed, and to be tried again."""
    from optuna.trial import TrialState

    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        study.tell(trial.number, state=TrialState.FAIL)
        study.enqueue_trial(trial.params)
