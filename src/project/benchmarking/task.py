"""What a measured process is told, and what it reports: two JSON files."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from project.files import write_whole


@dataclass(frozen=True)
class Task:
    """One measurement.

    Attributes:
        config: The experiment, composed and resolved: which net, data, optimizer and schedule.
        steps: Steps in all; batches, if validation is measured; -1 for the epochs that the config says.
        report: The file that the process, or its rank 0, writes.
        strategy: ``single``, ``ddp``, ``dp`` or ``fsdp``.
        devices: Ranks; for dp, devices of one process.
        measure: ``train``, ``validate`` for batches of the validation set, or ``tracking`` for steps with and without.
        warmup_steps: The first ones, that the reader leaves out.
    """

    config: dict[str, Any]
    steps: int
    report: str
    strategy: str = "single"
    devices: int = 1
    measure: str = "train"
    warmup_steps: int = 0

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_command_line(cls) -> Task:
        return cls(**json.loads(Path(sys.argv[1]).read_text()))


class StepClock:
    """Notes when each step ended, and writes the report after the last.

    The times are of the monotonic clock, which all processes of a host share. On a GPU work is queued: the clock
    waits for it twice, after the last step of the warm-up and after the last of all.
    """

    def __init__(self, report: str, steps: int, warmup_steps: int = 0) -> None:
        self.report = report
        self.steps = steps
        self.warmup_steps = warmup_steps
        self.ends_s: list[float] = []
        self.epochs: list[int] = []

    def tick(self, epoch: int) -> bool:
        """Note the end of a step; whether it was the last."""
        if len(self.ends_s) + 1 in (self.warmup_steps, self.steps):
            _wait_for_gpu()
        self.ends_s.append(time.monotonic())
        self.epochs.append(epoch)
        return len(self.ends_s) == self.steps

    def write(self, loss: float | None = None) -> None:
        """Write the report."""
        report = {"ends_s": self.ends_s, "epochs": self.epochs, "loss": loss}
        write_whole(Path(self.report), json.dumps(report))


def _wait_for_gpu() -> None:
    import torch

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
