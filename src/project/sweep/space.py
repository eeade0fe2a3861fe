"""What a search chooses from: Hydra's sweep overrides as Optuna's distributions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep

from project.errors import UserError

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

Space = dict[str, "BaseDistribution"]


def space_of(sweeps: Sequence[Override]) -> Space:
    """``{key: distribution}`` of the overrides that hold several values.

    Raises:
        UserError: a range or interval that is empty, or can't be searched on a logarithmic scale.
    """
    return {sweep.get_key_element(): _distribution(sweep) for sweep in sweeps}


def _distribution(sweep: Override) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    value = sweep.value()
    tags = value.tags if isinstance(value, ChoiceSweep | RangeSweep | IntervalSweep) else set()
    if tags - {"log"}:
        raise UserError(f"{sweep.input_line}: the tag {min(tags - {'log'})} is not known: type tag(log, ...)")
    log = "log" in tags
    try:
        if isinstance(value, IntervalSweep):
            assert value.start is not None
            assert value.end is not None
            kind = IntDistribution if isinstance(value.start, int) and isinstance(value.end, int) else FloatDistribution
            return kind(value.start, value.end, log=log)  # type: ignore[arg-type]
        if isinstance(value, RangeSweep):
            low, high, step = bounds(value)
            if all(isinstance(number, int) for number in (low, high, step)):
                return IntDistribution(int(low), int(high), log=log, step=1 if log else int(step))
            return FloatDistribution(low, high, log=log, step=None if log else step)
    except (ValueError, TypeError) as error:
        raise UserError(f"{sweep.input_line} can't be searched ({error}): type another range or interval") from error
    # The values as they are typed, so that what comes out is an override again.
    return CategoricalDistribution(list(sweep.sweep_string_iterator()))


def bounds(value: RangeSweep) -> tuple[float, float, float]:
    """Smallest and largest value and the step between: Hydra's ranges end before ``stop``, Optuna's at it.

    Raises:
        ValueError: there is none.
    """
    assert value.start is not None
    assert value.stop is not None
    start, stop, step = value.start, value.stop, value.step
    steps = math.ceil(round((stop - start) / step, 9)) - 1
    if steps < 0:
        raise ValueError("it is empty")
    low, high = sorted((start, start + steps * step))
    return low, high if isinstance(high, int) else round(high, 12), abs(step)


def value_as_typed(value: Any) -> str:
    """A value that Optuna chose, as one would type it."""
    return value if isinstance(value, str) else repr(value)


def grid_of(space: Space) -> dict[str, list[Any]]:
    """All values of each parameter, for ``sweep/sampler=grid``.

    Raises:
        UserError: an interval, or a logarithmic range, which has no list of values.
    """
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    grid: dict[str, list[Any]] = {}
    for key, distribution in space.items():
        if isinstance(distribution, CategoricalDistribution):
            grid[key] = list(distribution.choices)
        elif isinstance(distribution, IntDistribution):
            grid[key] = list(range(distribution.low, distribution.high + 1, distribution.step))
        elif isinstance(distribution, FloatDistribution) and distribution.step is not None:
            steps = round((distribution.high - distribution.low) / distribution.step)
            grid[key] = [round(distribution.low + n * distribution.step, 12) for n in range(steps + 1)]
        else:
            raise UserError(
                f"{key} is an interval, and sweep/sampler=grid needs values: type choice(...) or range(...)"
            )
    return grid
