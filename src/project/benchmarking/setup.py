"""From the experiment that is benchmarked to the config of one measured training."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from project.benchmarking.measure import Contender, MeasurementError, measure, seconds_per_step
from project.benchmarking.task import Task
from project.config.composition import config_folder, experiment_file, take_experiment_file
from project.cpu import threads_given, usable_cores
from project.errors import UserError

Config = dict[str, Any]
PLAIN = {
    "devices": 1,
    "num_nodes": 1,
    "strategy": "auto",
    "precision": "32-true",
    "accumulate_grad_batches": 1,
    "gradient_clip_val": None,
}


def training_config(config: Config, batch_size: int, steps: int, val_batches: int = 0) -> Config:
    """The experiment for so many steps in one epoch, on random images of its data's shape, held in memory.

    No time then goes into reading data, into validation (unless there are ``val_batches``) or into the test.

    Raises:
        UserError: the experiment has something that the hand-written loop has not.
    """
    data, model, trainer = config["data"], config["model"], config["trainer"]
    if not {"image_shape", "num_classes"} <= data.keys() or "net" not in model:
        raise UserError(
            f"the hand-written loop trains classifiers of images, not {model['_target_']}: type experiment=digits_mlp"
        )
    for name, plain in PLAIN.items():
        if trainer[name] != plain:
            raise UserError(
                f"trainer.{name}={trainer[name]} is not what the hand-written loops do: leave it out "
                "(benchmark.devices and benchmark.strategies choose ranks and strategies)"
            )
    images = {
        "_target_": "project.benchmarking.workload.RandomImages",
        "image_shape": data["image_shape"],
        "num_classes": data["num_classes"],
        "length": batch_size * steps,
        "val_length": batch_size * max(1, val_batches),
        "batch_size": batch_size,
        "seed": config["seed"],
    }
    length = {
        "max_epochs": -1,
        "max_steps": steps,
        "limit_train_batches": None,
        "limit_val_batches": val_batches,
        "num_sanity_val_steps": 0,
        "check_val_every_n_epoch": 1,
        "val_check_interval": None,
    }
    kept = {key: value for key, value in config.items() if key != "benchmark"}
    return kept | {"data": images, "test": False, "trainer": trainer | length}


def typed_for_training(overrides: list[str]) -> list[str]:
    """What was typed for the experiment, without what is for the benchmark."""
    own = [text for text in overrides if re.split(r"[.=/@]", text.lstrip("+~"))[0] not in ("benchmark", "paths")]
    return [
        f"experiment={experiment_file(text.partition('=')[2])}" if text.startswith("experiment=") else text
        for text in own
    ]


def typed_experiment() -> str | None:
    """The experiment that was chosen: its name, or the path of its file; None for ``experiment=none``."""
    chosen = HydraConfig.get().runtime.choices.get("experiment")
    return None if chosen in (None, "none") else experiment_file(chosen)


def compose_training(overrides: list[str]) -> Config:
    """The config of ``python -m project.train`` with these overrides."""
    arguments = list(overrides)
    take_experiment_file(arguments)
    current, hydra_config = GlobalHydra.instance().hydra, HydraConfig.instance().cfg
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(config_folder()), version_base="1.3"):
            composed = compose("train", arguments)
    finally:
        GlobalHydra.instance().hydra, HydraConfig.instance().cfg = current, hydra_config
    composed.paths.run_dir = ""
    plain: Config = OmegaConf.to_container(composed, resolve=True)  # type: ignore[assignment]
    return plain


def with_net(config: Config, **arguments: Any) -> Config:
    """The config with other arguments of its net."""
    model = config["model"]
    return config | {"model": model | {"net": model["net"] | arguments}}


def template(
    name: str,
    config: Config,
    steps: int,
    warmup_steps: int,
    per_step: int = 1,
    strategy: str = "auto",
    devices: int = 1,
) -> Contender:
    """The template's training as a contender."""
    trainer = config["trainer"] | {"strategy": strategy, "devices": devices}
    task = Task(config | {"trainer": trainer}, steps, "", strategy, devices, warmup_steps=warmup_steps)
    seconds = seconds_per_step(warmup_steps, per_step)
    # Its threads are what its config says: by default fewer than a rank's share, where the steps are small.
    return Contender(name, ["-m", "project.benchmarking.template"], seconds, task, threads=None)


def hand_written(
    name: str,
    config: Config,
    steps: int,
    warmup_steps: int,
    per_step: int = 1,
    strategy: str = "single",
    devices: int = 1,
) -> Contender:
    """The hand-written loop as a contender; torchrun starts its ranks."""
    ranks = 1 if strategy in ("single", "dp") else devices
    # Its logs would stay in the temporary folder of the machine.
    run = ["-m", "torch.distributed.run", "--standalone", "--log-dir", "{folder}", "--nproc-per-node", str(ranks)]
    torchrun = run if ranks > 1 else []
    task = Task(config, steps, "", strategy, devices, warmup_steps=warmup_steps)
    seconds = seconds_per_step(warmup_steps, per_step)
    return Contender(
        name, [*torchrun, "-m", "project.benchmarking.hand_written"], seconds, task, threads_per_rank(ranks)
    )


def threads_per_rank(ranks: int) -> int:
    """The share of this host's cores, or what OMP_NUM_THREADS says."""
    return threads_given("OMP_NUM_THREADS") or max(1, usable_cores() // ranks)


def wide_enough(
    config: Config, step_ms: float, devices: int, folder: Path, timeout_s: float, measure_what: str = "train"
) -> Config:
    """The config with a net so wide that a step of one of ``devices`` ranks, on its share, takes ``step_ms`` here.

    ``measure_what`` is ``train``, or ``validate`` for the forward pass alone.

    Raises:
        UserError: the net has no width, or the calibration failed.
    """
    if "width" not in config["model"]["net"]:
        raise UserError(
            f"benchmark.step_ms={step_ms} sets model.net.width, which {config['model']['net']['_target_']} has not: "
            "type benchmark.step_ms=null to take the net as it is"
        )
    arguments = ["-m", "project.benchmarking.calibrate", str(step_ms)]
    task = Task(config, 1, "", "single", devices, measure_what)
    contender = Contender("calibration", arguments, lambda _: 0.0, task, threads_per_rank(devices))
    try:
        measured = measure(contender, folder, timeout_s)
    except MeasurementError as error:
        raise UserError(f"benchmark.step_ms={step_ms}: the calibration failed: {error}") from error
    return with_net(config, width=measured.report["width"])
