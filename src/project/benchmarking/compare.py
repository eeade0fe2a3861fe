"""Compare contenders in turns, so that whatever else the machine does falls on all of them alike."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from project.benchmarking.measure import Contender, MeasurementError, measure


@dataclass(frozen=True)
class Comparison:
    """One row to be: how fast ``candidate`` is, as a multiple of ``reference``.

    Attributes:
        what: The row's name.
        per: What the contenders' seconds are counted for: step, sample, epoch, start.
        at_least: The ratio that the project promises; None where it promises nothing.
    """

    what: str
    per: str
    candidate: Contender
    reference: Contender
    at_least: float | None = None


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of repeated measurements."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Row:
    """A comparison and what came of it: spreads, or the error.

    Attributes:
        candidate_s, reference_s: Seconds for one ``per``.
        times_as_fast: Reference's seconds by the candidate's, of the two measurements of each repeat.
    """

    what: str
    per: str
    candidate: str
    reference: str
    candidate_s: Spread | None = None
    reference_s: Spread | None = None
    times_as_fast: Spread | None = None
    at_least: float | None = None
    error: str | None = None


def compare(
    groups: list[list[Comparison]],
    repeats: int,
    folder: Path,
    timeout_s: float,
    tell: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """Measure every contender ``repeats`` times, those of a group right after each other.

    Within a group the order is rotated from repeat to repeat. Once a contender has failed, its rows carry its error,
    and neither it nor what only those rows need is tried again.

    Args:
        folder: For the processes' tasks, outputs and runs.
        tell: Called with a line before each measurement.
    """
    seconds: dict[str, list[float]] = {}
    errors: dict[str, str] = {}
    for repeat in range(repeats):
        for group in groups:
            for contender in _rotated(_contenders(group), repeat):
                rows = [{c.candidate.name, c.reference.name} for c in group]
                if not any(contender.name in row and not row & errors.keys() for row in rows):
                    continue
                tell(f"{repeat + 1}/{repeats} {contender.name}")
                own_folder = folder / str(repeat) / re.sub(r"[^\w.-]+", "_", contender.name)
                try:
                    measured = measure(contender, own_folder, timeout_s)
                    seconds.setdefault(contender.name, []).append(contender.seconds(measured))
                except MeasurementError as error:
                    errors[contender.name] = f"{contender.name}: {error}"
    return [_row(comparison, seconds, errors) for group in groups for comparison in group]


def _contenders(group: Iterable[Comparison]) -> list[Contender]:
    by_name = {side.name: side for comparison in group for side in (comparison.candidate, comparison.reference)}
    return list(by_name.values())


def _rotated(contenders: list[Contender], by: int) -> Iterator[Contender]:
    start = by % len(contenders)
    yield from contenders[start:] + contenders[:start]


def _row(comparison: Comparison, seconds: dict[str, list[float]], errors: dict[str, str]) -> Row:
    candidate, reference = comparison.candidate.name, comparison.reference.name
    row = Row(comparison.what, comparison.per, candidate, reference, at_least=comparison.at_least)
    failed = [errors[name] for name in (candidate, reference) if name in errors]
    if failed:
        return Row(**(row.__dict__ | {"error": "; ".join(failed)}))
    own, others = seconds[candidate], seconds[reference]
    ratios = [other_s / own_s for own_s, other_s in zip(own, others, strict=True)]
    spreads = {
        "candidate_s": Spread.of(own),
        "reference_s": Spread.of(others),
        "times_as_fast": Spread.of(ratios),
    }
    return Row(**(row.__dict__ | spreads))
