"""How far a training is: on a terminal a bar and a row for each rank, elsewhere a plain line now and then."""

from __future__ import annotations

import math
import sys
import time
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback, ProgressBar
from rich import progress_bar
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text
from torch import Tensor

from project.batch import num_samples
from project.config.build import build
from project.launch.heartbeat import BEAT, Sign
from project.launch.summary import readable
from project.tracking.facts import num_model_replicas, progress_of
from project.training.ending import ended_early

REDRAW_EVERY_S = 0.25
MOST_METRICS = 4  # of validation, besides those that the model logs with prog_bar=True
STALE_S = 5.0  # from which on a rank that does not move is told


def display_of(config: dict[str, Any], callbacks: list[Callback]) -> list[Callback]:
    """The display that a config asks for; none where the user's callbacks bring a bar, or progress is turned off."""
    is_wanted = config.get("progress") and config["trainer"].get("enable_progress_bar", True)
    if not is_wanted or any(isinstance(callback, ProgressBar) for callback in callbacks):
        return []
    return [build(config, "progress")]


def shows_bar(config: dict[str, Any]) -> bool:
    """Whether Lightning's bar is to be shown, where nobody trains: a file or a pipe has no use for it."""
    return bool(config["trainer"].get("enable_progress_bar", True)) and sys.stdout.isatty()


class ProgressDisplay(ProgressBar):
    """Shown by rank 0 alone, which reads what the others do from the memory that they note it in: no rank waits.

    Args:
        interval_s: Between two lines where the output is no terminal.
        max_ranks: With more ranks, only those that are the farthest behind get a row.

    Raises:
        ValueError: an argument is not above 0.
    """

    def __init__(self, interval_s: float = 10.0, max_ranks: int = 16) -> None:
        super().__init__()
        if interval_s <= 0 or max_ranks <= 0:
            raise ValueError(
                f"progress.interval_s={interval_s} and progress.max_ranks={max_ranks} must be above 0: "
                "type progress.interval_s=10 progress.max_ranks=16"
            )
        self.interval_s = interval_s
        self.max_ranks = max_ranks
        self._is_enabled = True
        self._live: Live | None = None

    def enable(self) -> None:
        self._is_enabled = True

    def disable(self) -> None:
        self._is_enabled = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        now = time.monotonic()
        self._shown_at = self._began_at = now
        self._paused_s = 0.0
        self._validations_s: list[float] = []
        self._batches, self._samples = 0, 0
        self._read: dict[str, tuple[Tensor, float | None]] = {}
        self._num_replicas = num_model_replicas(trainer)
        if self._is_enabled and sys.stdout.isatty():
            # Without a thread of its own: what the training prints meanwhile goes above the display.
            self._live = Live(console=Console(), auto_refresh=False, transient=True)
            self._live.start()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._batches += 1
        self._samples += num_samples(batch) * self._num_replicas
        self._show(trainer, pl_module)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._validation_began_at = time.monotonic()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking and hasattr(self, "_validations_s"):
            self._validations_s.append(time.monotonic() - self._validation_began_at)
            self._paused_s += self._validations_s[-1]

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._show(trainer, pl_module, is_last=True)
        self._stop()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._stop()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _show(self, trainer: L.Trainer, module: L.LightningModule, is_last: bool = False) -> None:
        now = time.monotonic()
        due = now - self._shown_at >= (REDRAW_EVERY_S if self._live else self.interval_s)
        if not self._is_enabled or not self._batches or not (due or is_last):
            return
        self._shown_at = now
        line = self._line(trainer, module, is_last)
        if self._live is None:
            print(line, flush=True)
            return
        self._live.update(self._drawn(trainer, line), refresh=True)
        if is_last:
            self._live.console.print(line, highlight=False)

    def _line(self, trainer: L.Trainer, module: L.LightningModule, is_last: bool) -> str:
        trained_s = max(1e-9, time.monotonic() - self._began_at - self._paused_s)
        progress = progress_of(trainer)
        left_s = progress.remaining_s(trained_s / self._batches, self._validations_s, self._batches)
        # At the end no epoch is under way: as the run's table counts them.
        epoch, epochs = trainer.current_epoch + (not is_last), trainer.max_epochs or -1
        parts = [
            f"epoch {min(epoch, epochs)}/{epochs}" if epochs > 0 else f"epoch {epoch}",
            f"step {trainer.global_step:,}" + (f"/{trainer.max_steps:,}" if trainer.max_steps > 0 else ""),
            f"{self._samples / trained_s:,.0f} samples/s",
        ]
        why = ended_early(trainer) if is_last else None
        if why is not None:
            parts.append(f"ended early ({why})")
        elif not math.isnan(progress.share()):
            parts.append(f"{progress.share():.0%}")
        if left_s > 0 and not is_last:
            parts.append(f"{duration(left_s)} left")
        # What is known already: to ask for callback_metrics might compute, which is for all ranks to do.
        known = trainer._logger_connector._callback_metrics
        validated = {name: value for name, value in known.items() if name.startswith("val")}
        shown: dict[str, Any] = self.get_metrics(trainer, module)
        shown |= dict([(name, value) for name, value in validated.items() if name not in shown][:MOST_METRICS])
        metrics = {name: self._number(name, value) for name, value in shown.items()}
        told = [f"{name} {readable(value)}" for name, value in metrics.items() if value is not None and name != "v_num"]
        return ", ".join(parts) + (f": {', '.join(told)}" if told else "")

    def _number(self, name: str, value: Any) -> float | None:
        """Of a logged value; a tensor is read once, not at each redraw, which would wait for a GPU."""
        if not isinstance(value, Tensor):
            return as_number(value)
        if name not in self._read or self._read[name][0] is not value:
            self._read[name] = (value, as_number(value))
        return self._read[name][1]

    def _drawn(self, trainer: L.Trainer, line: str) -> RenderableType:
        share = progress_of(trainer).share()
        bar = progress_bar.ProgressBar(completed=0 if math.isnan(share) else 100 * share, total=100, width=60)
        signs = BEAT.signs()
        return Group(Text(line), bar, *([self._rows(signs)] if len(signs) > 1 else []))

    def _rows(self, signs: list[Sign]) -> Table:
        first = max(sign.step for sign in signs)
        table = Table(box=None, pad_edge=False, show_header=False)
        for sign in sorted(farthest_behind(signs, self.max_ranks), key=lambda sign: sign.rank):
            behind = f"{first - sign.step} behind" if sign.step < first else ""
            stale = f"for {sign.age_s:.0f} s" if sign.age_s > STALE_S else ""
            table.add_row(f"rank {sign.rank}", f"step {sign.step:,}", sign.phase, behind, stale)
        return table


def farthest_behind(signs: list[Sign], most: int) -> list[Sign]:
    """So many ranks: those with the fewest steps, and among them those that have not moved for the longest."""
    return sorted(signs, key=lambda sign: (sign.step, -sign.age_s))[:most]


def duration(seconds: float) -> str:
    """For people: ``42 s``, ``3 min 20 s``, ``2 h 05 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def as_number(value: Any) -> float | None:
    """A logged value, if it is one number."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return None
