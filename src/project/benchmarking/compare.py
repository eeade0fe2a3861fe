"""Compare contenders in turns, so that whatever else the machine does falls on all of them alike."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from project.benchmarking.measure import Contender, Measured, MeasurementError, measure


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


# Quantiles of Student's t, 97.5 %, for 1, 2, ... degrees of freedom; with more the last is a little too careful.
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclass(frozen=True)
class Spread:
    """Median of repeated measurements, and from where to where they lie."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """From the smallest to the largest."""
        return cls(statistics.median(values), min(values), max(values))

    @classmethod
    def expected(cls, values: list[float]) -> Spread:
        """Where the mean of others lies, measured likewise, with 95 % confidence (Student's t).

        Of three measurements the smallest and the largest have the median of all between them in three cases of four.
        """
        median = statistics.median(values)
        if len(values) == 1:
            return cls(median, median, median)
        error = statistics.stdev(values) / len(values) ** 0.5
        margin = T_QUANTILES[min(len(values) - 1, len(T_QUANTILES)) - 1] * error
        mean = statistics.fmean(values)
        return cls(median, min(median, max(0.0, mean - margin)), max(median, mean + margin))

    @property
    def is_known(self) -> bool:
        """Whether there is a range: one measurement alone has none."""
        return self.low < self.high

    def readable(self, form: str) -> str:
        """The median, and in brackets the range where there is one; ``form`` is a number's, as ``.2f``."""
        return f"{self.median:{form}}{f' ({self.low:{form}} to {self.high:{form}})' if self.is_known else ''}"


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

    Within a group the order is rotated from repeat to repeat; contenders of the same process, which reports on all of
    them, share it. Once a contender has failed, its rows carry its error, and neither it nor what only those rows need
    is tried again.

    Args:
        folder: For the processes' tasks, outputs and runs.
        tell: Called with a line before each measurement.
    """
    seconds: dict[str, list[float]] = {}
    errors: dict[str, str] = {}
    for repeat in range(repeats):
        for group in groups:
            done: dict[str, Measured] = {}
            for contender in _rotated(_contenders(group), repeat):
                rows = [{c.candidate.name, c.reference.name} for c in group]
                if not any(contender.name in row and not row & errors.keys() for row in rows):
                    continue
                process = contender.process or contender.name
                try:
                    if process not in done:
                        tell(f"{repeat + 1}/{repeats} {process}")
                        own_folder = folder / str(repeat) / re.sub(r"[^\w.-]+", "_", process)
                        done[process] = measure(contender, own_folder, timeout_s)
                    seconds.setdefault(contender.name, []).append(contender.seconds(done[process]))
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
