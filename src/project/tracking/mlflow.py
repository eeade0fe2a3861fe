"""MLflow gets what TensorBoard gets: curves, figures, texts, hyperparameters and the config."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from lightning.pytorch.loggers import MLFlowLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import OmegaConf

from project.errors import UserError
from project.notices import notice
from project.tracking.logger_state import keep, kept, title

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def on_rank_zero(run_dir: str, outputs: str, experiment_name: str, tracking_uri: str | None = None) -> Logger:
    """The logger on rank 0, and one that does nothing elsewhere: MLflow's client opens its store when it is made."""
    is_first = rank_zero_only.rank == 0  # type: ignore[attr-defined]
    return MLflowRun(run_dir, outputs, experiment_name, tracking_uri) if is_first else Silent()


class Silent(Logger):
    """A logger that does nothing."""

    name = version = ""

    def _nothing(self, *args: Any, **kwargs: Any) -> None: ...

    start_run = finish_run = log_metrics = log_hyperparams = add_figure = add_text = _nothing


class MLflowRun(MLFlowLogger):
    """Lightning's logger for MLflow; a run that goes on is the same one there.

    Points that were logged after the checkpoint from which a run goes on stay: MLflow takes none back.

    Args:
        run_dir: The run folder.
        outputs: Where database and artifacts of all runs lie, if there is no server: ``mlflow.db`` and ``mlflow``.
        experiment_name: What MLflow lists the run under.
        tracking_uri: Of a server or database; by default ``MLFLOW_TRACKING_URI``.
    """

    def __init__(self, run_dir: str, outputs: str, experiment_name: str, tracking_uri: str | None = None) -> None:
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")  # 7 are four minutes of silence
        self._run_dir = run_dir
        facts = kept(run_dir, "mlflow")
        uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        self._folder = None if uri else Path(facts.get("folder", outputs)).resolve()
        with self._alone():
            super().__init__(
                experiment_name=experiment_name,
                run_name=title(run_dir),
                tracking_uri=uri or f"sqlite:///{self._folder}/mlflow.db",
                artifact_location=f"{self._folder}/mlflow" if self._folder else None,
                run_id=facts.get("id"),
            )
        # A call takes 30 ms with a database and longer with a server; steps do not wait for it.
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mlflow")
        self._fails_until = 0.0  # of time.monotonic

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep jobs of a sweep, which start at once, from making the same database or experiment."""
        from filelock import FileLock

        if self._folder is None:  # a server sees to that
            yield
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self._folder / "mlflow.lock"):
            yield

    @rank_zero_only
    def start_run(self, config: dict[str, Any], environment: dict[str, Any], hparams: dict[str, Any]) -> None:
        """Log what is known before the first step. Of a run that goes on, MLflow keeps the hyperparameters it has.

        Raises:
            UserError: MLflow can't be reached, or does not know the run that goes on.
        """
        from mlflow.exceptions import MlflowException

        try:
            with self._alone():
                client, run_id = self.experiment, str(self.run_id)
        except MlflowException as error:
            reason = " ".join(str(error).split())[:200]
            advice = "look at MLFLOW_TRACKING_URI, or type logger=tensorboard"
            raise UserError(f"logger=mlflow finds no run of its own to log to ({reason}): {advice}") from error
        keep(self._run_dir, "mlflow", id=run_id, **({"folder": str(self._folder)} if self._folder else {}))
        client.update_run(run_id, status="RUNNING")
        known = client.get_run(run_id).data.params
        super().log_hyperparams({name: value for name, value in hparams.items() if name not in known})
        client.log_text(run_id, OmegaConf.to_yaml(OmegaConf.create(config)), "config.yaml")
        client.log_text(run_id, json.dumps(environment, indent=2), "environment.json")

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log one point of some curves, in the background."""
        self._do(super().log_metrics, dict(metrics), step)

    @rank_zero_only
    def add_figure(self, tag: str, figure: Figure, step: int) -> None:
        """Log a figure of matplotlib as ``<tag>.png``, in place of the one before."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        canvas = FigureCanvasAgg(figure)
        canvas.draw()  # type: ignore[no-untyped-call]  # here: matplotlib is not for several threads
        image = np.array(canvas.buffer_rgba())  # type: ignore[no-untyped-call]
        self._do(self.experiment.log_image, str(self.run_id), image, f"{tag}.png")

    @rank_zero_only
    def add_text(self, tag: str, text: str, step: int) -> None:
        """Log a text as ``<tag>.md``, in place of the one before."""
        self._do(self.experiment.log_text, str(self.run_id), text, f"{tag}.md")

    def _do(self, call: Callable[..., None], *arguments: Any) -> None:
        """Call MLflow in the background; a server that fails costs a run points of its curves, not its training."""

        def spared() -> None:
            if time.monotonic() < self._fails_until:
                return
            try:
                call(*arguments)
            except Exception as error:
                if not self._fails_until:
                    notice(f"MLflow fails, points are left out: {' '.join(str(error).split())[:200]}")
                self._fails_until = time.monotonic() + 60

        self._worker.submit(spared)

    @rank_zero_only
    def finish_run(self, status: str = "success") -> None:
        """Log what is left, and mark the run as finished."""
        self._do(super().finalize, status)
        self._worker.shutdown()

    @rank_zero_only
    def finalize(self, status: str = "success") -> None:
        """Lightning calls this after fit and after test alike; only a failure is the end of the run."""
        if status == "failed":
            self.finish_run(status)

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: ``start_run`` logs the config's, of which the module's arguments are a part."""
