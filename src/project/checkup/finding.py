"""One line of the doctor's report."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Status(StrEnum):
    """How a thing was found; only ``BROKEN`` means that training can't work."""

    GOOD = "good"
    WARNING = "warning"
    BROKEN = "broken"


@dataclass(frozen=True)
class Finding:
    """What was looked at, how it was found, and what to type to mend it."""

    name: str
    value: str
    status: Status = Status.GOOD
    remedy: str | None = None
    figures: dict[str, float] = field(default_factory=dict)  # units stand in the names


def graded(name: str, value: str, amount: float, warn_below: float, broken_below: float, remedy: str) -> Finding:
    """A finding about something there should be enough of; the remedy is left out where there is."""
    if amount >= warn_below:
        return Finding(name, value)
    return Finding(name, value, Status.BROKEN if amount < broken_below else Status.WARNING, remedy)
