"""Checkpoints that carry their run's config, and reading it back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, Timer

from project.config.trust import signature
from project.errors import UserError
from project.notices import notice
from project.strategies.readable import described, unreadable

CONFIG_KEY = "config"
SIGNATURE_KEY = "signature"  # of the config


class ConfigInCheckpoint(Callback):
    """Stores the composed config, as plain data, in every checkpoint: evaluation needs nothing else.

    Refuses stored hyperparameters that can't be read back, before any training is lost to them.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.checkpoint_callbacks:
            return
        for owner in (pl_module, getattr(trainer, "datamodule", None)):
            for name, value in dict(getattr(owner, "hparams", None) or {}).items():
                if found := unreadable(value):
                    raise UserError(
                        f"the checkpoints could not be read back, save_hyperparameters of {type(owner).__name__} "
                        f"stores {name}, {described(found[1])}, which is no plain data: type "
                        f'self.save_hyperparameters(ignore=["{name}"])'
                    )

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint[CONFIG_KEY] = self.config
        checkpoint[SIGNATURE_KEY] = signature(self.config)


@dataclass(frozen=True)
class BestCheckpoint:
    """Where the best weights lie; ``score`` is None where no metric was monitored."""

    path: str
    score: float | None


def best_checkpoint(trainer: L.Trainer) -> BestCheckpoint | None:
    """The checkpoint of the first callback that monitors a metric, else the last one; None without checkpoints.

    For all ranks. Tells where none could be saved.
    """
    saved: list[Any] = [c for c in trainer.checkpoint_callbacks if getattr(c, "best_model_path", "")]
    # What a full disk refused in the background may be named by its callback still.
    are_there = trainer.strategy.broadcast([Path(callback.best_model_path).exists() for callback in saved])
    saved = [callback for callback, is_there in zip(saved, are_there, strict=True) if is_there]
    saved.sort(key=lambda callback: callback.monitor is None)
    if not saved:
        if trainer.limit_train_batches == 0:
            notice(
                "No batch was trained on (trainer.limit_train_batches=0), and what is tested are the weights as they "
                "were built: type trainer.limit_train_batches=null to train on all"
            )
        elif trainer.global_step == 0 and any(isinstance(one, Timer) for one in getattr(trainer, "callbacks", [])):
            notice(
                "No step was trained before trainer.max_time had passed, and what is tested are the weights as they "
                "were built: type a longer trainer.max_time"
            )
        elif trainer.checkpoint_callbacks and not getattr(trainer, "fast_dev_run", False):  # which asks for none
            notice("No checkpoint could be saved: what is tested are the last weights, which end with this process")
        return None
    score = saved[0].best_model_score
    return BestCheckpoint(saved[0].best_model_path, None if score is None else float(score))


def read_config(path: Path) -> dict[str, Any]:
    """The config of the run that wrote a checkpoint; see ``read_signed_config``."""
    return read_signed_config(path)[0]


def read_signed_config(path: Path) -> tuple[dict[str, Any], str | None]:
    """The config of the run that wrote a checkpoint, and its signature (see ``trust``).

    Nothing in the file is executed (``weights_only``), and the weights stay on disk (``mmap``).

    Raises:
        UserError: there is no such file, it can't be read, or another program wrote it.
    """
    if path.is_dir():  # in parts, since its run did not come to its end
        from project.strategies.sharded_checkpoint import consolidate

        consolidate(path)
    if not path.is_file():
        at_hand = sorted(path.parent.glob("*.ckpt")) if path.parent.is_dir() else []
        hint = f", there are {', '.join(p.name for p in at_hand)}" if at_hand else ""
        raise UserError(f"ckpt_path={path} is no file{hint}: type ckpt_path=<run folder>/checkpoints/best.ckpt")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises whatever its zip reader and unpickler stumble over
        raise UserError(
            f"ckpt_path={path} can't be read, it is damaged or no checkpoint ({type(error).__name__}): "
            "type the path of another, as the last.ckpt beside it"
        ) from error
    config = checkpoint.get(CONFIG_KEY) if isinstance(checkpoint, dict) else None
    if not isinstance(config, dict):
        raise UserError(
            f"ckpt_path={path} carries no config, so it was not written by project.train: type the path of one that was"
        )
    return config, checkpoint.get(SIGNATURE_KEY)


@contextmanager
def loading(path: str | None) -> Iterator[None]:
    """Tell a checkpoint that does not fit the model in a sentence."""
    try:
        yield
    except ValueError as error:
        if path is None or "total steps" not in str(error):
            raise
        raise UserError(
            f"the schedule of the run was made for its first length, and can't go past it ({error}): type "
            "scheduler=none, which keeps the last learning rate, or start a new run"
        ) from error
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        if not lines or "Error(s) in loading state_dict" not in lines[0]:
            raise
        raise UserError(
            f"ckpt_path={path} holds another architecture than the config builds ({lines[1].rstrip('.')}): "
            "leave out the overrides of model and data, or type the path of a checkpoint of this model"
        ) from error
