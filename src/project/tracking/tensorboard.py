"""The TensorBoard files of a run: its config and environment as text, its hyperparameters, its curves."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import OmegaConf
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import api_pb2, metadata
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo, SessionStartInfo
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class RunLogger(TensorBoardLogger):
    """Lightning's TensorBoard logger, writing to ``<run_dir>/tensorboard``, with a useful HParams tab.

    TensorBoard takes the HParams columns from the first experiment record that it meets, so that runs with other
    metrics lose theirs. Written are therefore only a session's start (the hyperparameters) and end: TensorBoard
    then shows the union of all runs, with every scalar as a metric.
    """

    def __init__(self, run_dir: str, flush_secs: int = 10) -> None:
        super().__init__(run_dir, name="tensorboard", version="", default_hp_metric=False, flush_secs=flush_secs)
        self._in_session = False

    @rank_zero_only
    def start_run(self, config: dict[str, Any], environment: dict[str, Any], hparams: dict[str, Any]) -> None:
        """Write what is known before the first step."""
        start = SessionStartInfo(start_time_secs=time.time())
        for name, value in hparams.items():
            kind = "bool" if isinstance(value, bool) else "string" if isinstance(value, str) else "number"
            setattr(start.hparams[name], f"{kind}_value", value)
        self._write(metadata.SESSION_START_INFO_TAG, HParamsPluginData(session_start_info=start))
        self._in_session = True
        self.experiment.add_text("config", _code(OmegaConf.to_yaml(OmegaConf.create(config))))
        self.experiment.add_text("environment", _code(json.dumps(environment, indent=2)))

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Write the values of a step as one record: four took 0.20 ms so, and 0.34 with a record each."""
        plain = {tag: value.item() if isinstance(value, Tensor) else value for tag, value in metrics.items()}
        if not all(isinstance(value, int | float) for value in plain.values()):
            super().log_metrics(metrics, step)  # which tells what it can't take
            return
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in plain.items()]
        self.experiment._get_file_writer().add_summary(Summary(value=values), step)

    @rank_zero_only
    def add_figure(self, tag: str, figure: Figure, step: int) -> None:
        """Log a figure of matplotlib."""
        self.experiment.add_figure(tag, figure, step)

    @rank_zero_only
    def add_text(self, tag: str, text: str, step: int) -> None:
        """Log a text, which is read as Markdown."""
        self.experiment.add_text(tag, text, step)

    @rank_zero_only
    def finish_run(self, failed: bool = False) -> None:
        """Mark the run in the HParams tab as finished, or as failed, and close the file."""
        if self._in_session:
            status = api_pb2.STATUS_FAILURE if failed else api_pb2.STATUS_SUCCESS
            end = SessionEndInfo(status=status, end_time_secs=time.time())
            self._write(metadata.SESSION_END_INFO_TAG, HParamsPluginData(session_end_info=end))
            self._in_session = False
        self.experiment.close()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Lightning calls this after fit and after test alike; closing here would start a file for each."""
        self.experiment.flush()
        if status == "failed":
            self.finish_run(failed=True)

    def _write(self, tag: str, data: HParamsPluginData) -> None:
        # TensorBoard's own functions for this import TensorFlow; the record is a summary without a value.
        value = Summary.Value(tag=tag, metadata=metadata.create_summary_metadata(data))
        value.tensor.CopyFrom(metadata.NULL_TENSOR)
        self.experiment._get_file_writer().add_summary(Summary(value=[value]))
        self.experiment.flush()

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: what Lightning would write here are the module's arguments and an ``hp_metric`` of -1."""

    def save(self) -> None:
        """Nothing: the config lies in the run folder, so no ``hparams.yaml`` is needed."""


def _code(text: str) -> str:
    """Markdown that shows the text as it is: TensorBoard reads four spaces as a block of code."""
    return "\n".join(f"    {line}" for line in text.splitlines())
