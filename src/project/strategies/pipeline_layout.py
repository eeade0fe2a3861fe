"""How a pipeline is laid out over ranks and cuts its batches, by arithmetic alone: checked before any rank starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from project.errors import UserError, nearest

SCHEDULES = ("gpipe", "1f1b", "interleaved")
MICRO_BATCHES_PER_STAGE = 4  # with 4 for each stage, ranks wait for about a fifth of the time


@dataclass(frozen=True)
class PipelineLayout:
    """One pipeline.

    Attributes:
        schedule: ``gpipe``, ``1f1b`` or ``interleaved``.
        ranks: Ranks that form it.
        stages_per_rank: Rank r of R holds the stages r, r + R, r + 2R ...
        micro_batches: Parts that a rank's batch is cut into in training; None chooses them for each length.
    """

    schedule: str
    ranks: int
    stages_per_rank: int = 1
    micro_batches: int | None = None

    @property
    def stages(self) -> int:
        return self.ranks * self.stages_per_rank

    @property
    def most_micro_batches(self) -> int:
        return self.micro_batches or MICRO_BATCHES_PER_STAGE * self.stages

    def cut(self, length: int) -> int | None:
        """Micro-batches, all of one size, that ``length`` samples are cut into; None where they can't be."""
        if self.micro_batches is not None:
            return None if length % self.micro_batches else self.micro_batches
        numbers = range(min(length, self.most_micro_batches), 0, -1)
        return next((n for n in numbers if length % n == 0 and self._is_run(n)), None)

    def cut_padded(self, length: int) -> tuple[int, int]:
        """Micro-batches, and samples in each, that hold ``length`` samples, where the last may be filled up."""
        size = -(-length // self.most_micro_batches)
        number = -(-length // size)
        while self.schedule == "interleaved" and not self._is_run(number):
            number += 1
        return number, size

    def unit(self) -> int:
        """A number whose multiples can be cut."""
        return self.micro_batches or self.stages

    def check(self) -> None:
        """Check the micro-batches that were asked for.

        Raises:
            UserError: the schedule can't run as many.
        """
        if self.micro_batches is not None and not self._is_run(self.micro_batches):
            low, high = self.micro_batches // self.ranks * self.ranks, -(-self.micro_batches // self.ranks) * self.ranks
            allowed = f"{low} or {high}" if self.schedule == "interleaved" else f"{self.stages} or more"
            raise UserError(
                f"trainer.strategy.micro_batches={self.micro_batches} can't be run by schedule={self.schedule} with "
                f"{self.stages} stages on {self.ranks} ranks: type trainer.strategy.micro_batches={allowed}, or "
                "trainer.strategy.schedule=gpipe"
            )

    def _is_run(self, micro_batches: int) -> bool:
        if self.schedule == "1f1b":
            return micro_batches >= self.stages
        if self.schedule == "interleaved":  # in rounds of one micro-batch for each rank, or a few more
            return micro_batches % max(1, micro_batches // self.ranks) == 0
        return True


def layout_of(arguments: Mapping[str, Any], local_world_size: int) -> PipelineLayout:
    """The layout that a strategy's arguments ask for, with ``local_world_size`` ranks on each host.

    Raises:
        UserError: an argument can't be, or the ranks of a host can't be shared out to such pipelines.
    """
    given = {"schedule": "1f1b", "stages": "auto", "stages_per_rank": "auto", "micro_batches": "auto"} | {
        name: value for name, value in arguments.items() if value is not None
    }
    schedule = given["schedule"]
    if schedule not in SCHEDULES:
        raise UserError(
            f"trainer.strategy.schedule={schedule} is not known ({', '.join(SCHEDULES)}): type "
            f"trainer.strategy.schedule={nearest(str(schedule), SCHEDULES) or '1f1b'}"
        )
    for name, least in (("stages", 1), ("stages_per_rank", 1), ("micro_batches", 1)):
        value = given[name]
        if value != "auto" and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise UserError(f"trainer.strategy.{name}={value} can't be: type a whole number from {least}, or auto")
    several = schedule == "interleaved"
    per_rank = (2 if several else 1) if given["stages_per_rank"] == "auto" else given["stages_per_rank"]
    if several != (per_rank > 1):
        advice = "stages_per_rank=2" if several else "schedule=interleaved"
        raise UserError(
            f"trainer.strategy.stages_per_rank={per_rank} does not go with schedule={schedule}, as only interleaved "
            f"stages share a rank: type trainer.strategy.{advice}"
        )
    stages = local_world_size * per_rank if given["stages"] == "auto" else given["stages"]
    ranks = -(-stages // per_rank)
    if stages % per_rank:
        raise UserError(
            f"trainer.strategy.stages={stages} can't be shared out with stages_per_rank={per_rank}: type "
            f"trainer.strategy.stages={ranks * per_rank}, or trainer.strategy.stages=auto"
        )
    if local_world_size % ranks:
        raise UserError(
            f"trainer.devices={local_world_size} is no multiple of the {ranks} ranks that trainer.strategy.stages="
            f"{stages} needs: type trainer.devices={-(-local_world_size // ranks) * ranks}, or "
            "trainer.strategy.stages=auto"
        )
    if ranks == 1 and local_world_size > 1:
        raise UserError(
            f"trainer.strategy.stages={stages} leaves nothing to pass on from rank to rank: type trainer/strategy=ddp, "
            "or trainer.strategy.stages=auto"
        )
    micro_batches = None if given["micro_batches"] == "auto" else given["micro_batches"]
    layout = PipelineLayout(schedule, ranks, per_rank, micro_batches)
    layout.check()
    return layout
