"""A command, called from Python: for notebooks and scripts."""

from __future__ import annotations

import time

from hydra import compose, initialize_config_dir

from project.config.composition import config_folder, explain, register_resolvers
from project.config.from_checkpoint import compose_from_checkpoint
from project.errors import UserError
from project.launch.job import run_job
from project.launch.resume import compose_resumed
from project.launch.run import Outcome


def call(command: str, *overrides: str) -> Outcome:
    """Run a command as from the shell: ``call("train", "trainer.devices=2")``.

    Several ranks run in processes of their own, so that a notebook can start one run after another.

    Args:
        command: ``train``, ``evaluate`` or ``predict``.
        overrides: What one would type after it.

    Returns:
        The metrics, and where run folder and checkpoint are.

    Raises:
        UserError: something that was typed can't be; the text says what to type.
    """
    if command not in ("train", "evaluate", "predict"):
        raise UserError(f"there is no command {command}: type train, evaluate or predict")
    started_at = time.time()
    register_resolvers()
    arguments = [command, *overrides]
    config_name = (compose_resumed if command == "train" else compose_from_checkpoint)(command, arguments)
    try:
        with initialize_config_dir(str(config_folder()), version_base="1.3"):
            composed = compose(config_name, arguments[1:])
    except Exception as error:
        text = explain(error, config_name, overrides)
        raise (UserError(text) if text else error) from None
    return run_job(f"project.{command}:{command}", composed, list(overrides), command, started_at=started_at)
