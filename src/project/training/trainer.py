"""The Trainer of a training, with all that the template adds to what the config names."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.loggers import Logger

from project.config.build import build, build_all
from project.config.secrets import masked
from project.launch.rank import cluster_environment
from project.launch.run import Run
from project.strategies.checkpoint_files import CheckpointFiles
from project.sweep.pruning import pruning
from project.training.checkpoint import ConfigInCheckpoint
from project.training.final_validation import FinalValidation
from project.training.last_window import LastWindow
from project.training.loops import install
from project.training.model_summary import summary_of
from project.training.monitor_check import MonitorCheck
from project.training.progress_display import display_of
from project.training.rank_states import RankStates
from project.training.step_threads import StepThreads


def build_trainer(config: dict[str, Any], run: Run, states: RankStates, loggers: list[Logger]) -> L.Trainer:
    """Build it; its loops can be saved, stopped and resumed between any two steps."""
    callbacks = build_all(config, "callbacks")
    trainer: L.Trainer = build(
        config,
        "trainer",
        default_root_dir=run.folder,
        callbacks=[
            MonitorCheck(config["monitor"], config["mode"]),
            states,
            StepThreads(config["launch"]["threads_per_rank"]),
            FinalValidation(),
            LastWindow(),
            *callbacks,
            *display_of(config, callbacks),
            *summary_of(config, callbacks),
            *pruning(config),
            ConfigInCheckpoint(masked(config)),
        ],
        logger=loggers,
        plugins=[cluster_environment(), CheckpointFiles()],
    )
    install(trainer)
    return trainer
