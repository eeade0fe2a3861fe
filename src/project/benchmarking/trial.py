"""A short training of an experiment, measured: ``python -m project.train`` with so many batches and a report.

python -m project.benchmarking.trial REPORT.json RUN_FOLDER SETTINGS.json [key=value ...]
"""

from __future__ import annotations

import json
import math
import sys
import traceback
from dataclasses import asdict, dataclass, field

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, open_dict

from project.benchmarking.measure import Contender, Measured
from project.config.composition import config_folder, explain, register_resolvers, take_experiment_file
from project.errors import sentence
from project.launch.job import run_job

MODULE = "project.benchmarking.trial"


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
        warmup_batches: Batches that are not measured.
        batches: Batches that are.
        batch_sizes: Of the forward passes whose latency is measured after the training; none by default.
        calls: Measured forward passes of each size.
    """

    warmup_batches: int
    batches: int
    batch_sizes: list[int] = field(default_factory=list)
    calls: int = 50


def contender(name: str, overrides: list[str], settings: Settings) -> Contender:
    """The experiment that ``overrides`` compose, as a process to be measured in seconds a sample."""
    typed = [text.replace("{", "{{").replace("}", "}}") for text in (json.dumps(asdict(settings)), *overrides)]
    arguments = ["-m", MODULE, "{report}", "{folder}", *typed]
    return Contender(name, arguments, lambda measured: 1 / samples_per_s(measured, settings), threads=None)


def samples_per_s(measured: Measured, settings: Settings) -> float:
    """Samples of all ranks a second after the warm-up, the changes of epoch included."""
    ends_s, samples = measured.report["ends_s"], measured.report["samples"]
    first = min(settings.warmup_batches, len(ends_s) - 1)
    rate: float = sum(samples[first:]) / (ends_s[-1] - ends_s[first - 1])
    return rate


def run(report: str, folder: str, settings: Settings, overrides: list[str]) -> None:
    """Compose, shorten and train."""
    register_resolvers()
    take_experiment_file(overrides)
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        config = compose("train", overrides)
    with open_dict(config):
        config.paths.run_dir = folder
        shorten(config, settings, report)
    run_job("project.train:train", config, overrides)


def shorten(config: DictConfig, settings: Settings, report: str) -> None:
    """So many batches and nothing else: no validation, no test, no checkpoint, nothing that waits for a metric."""
    batches = settings.warmup_batches + settings.batches
    config.trainer.update(
        max_epochs=-1,
        max_steps=math.ceil(batches / config.trainer.accumulate_grad_batches),
        limit_val_batches=0,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    config.update(test=False, monitor=None)
    if config.get("scheduler") and "monitor" in config.scheduler:
        config.scheduler = None
    callbacks = config.get("callbacks") or {}
    kept = {name: node for name, node in callbacks.items() if node and not {"dirpath", "monitor"} & node.keys()}
    of_trial = {
        "_target_": "project.benchmarking.trial_report.TrialReport",
        "report": report,
        "warmup_batches": settings.warmup_batches,
        "batch_sizes": list(settings.batch_sizes),
        "calls": settings.calls,
    }
    config.callbacks = kept | {"trial_report": of_trial}


if __name__ == "__main__":
    try:
        report_path, run_folder, settings_text, *typed_overrides = sys.argv[1:]
        run(report_path, run_folder, Settings(**json.loads(settings_text)), typed_overrides)
    except Exception as error:
        text = sentence(error) or explain(error, "train")
        if text is None:
            traceback.print_exc()
        sys.exit(f"error: {text or error}")
