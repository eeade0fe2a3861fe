"""The jobs of a sweep: what each runs with, what it is called, where its folder is."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.override_parser.types import Override, Quote, QuotedString

from project.config.composition import slug
from project.errors import UserError


@dataclass(frozen=True)
class Job:
    """One job of a sweep.

    Attributes:
        number: Its place in the sweep, from 0.
        name: The values that the sweep varies, as in ``lr=0.1,seed=2``.
        parameters: The same, ``{key: value as typed}``.
        folder: Its run folder, inside the sweep's.
    """

    number: int
    name: str
    parameters: dict[str, str]
    folder: Path

    @classmethod
    def of(cls, number: int, parameters: dict[str, str], sweep_folder: Path) -> Job:
        """The job of these parameters in a sweep's folder."""
        name = name_of(parameters)
        return cls(number, name, parameters, sweep_folder / slug(f"{number}_{name}" if name else str(number)))

    def overrides(self, fixed: Sequence[str], told: Mapping[str, str] | None = None) -> list[str]:
        """What Hydra composes the job with.

        ``fixed`` is typed for all jobs; ``told`` are values for ``hydra.sweeper.job``. The folder is decided here, and
        not where the job runs, which may be another process or host.
        """
        return [
            *fixed,
            *(f"{key}={value}" for key, value in self.parameters.items()),
            f"hydra.sweep.dir={quote(str(self.folder.parent))}",
            f"hydra.sweep.subdir={quote(self.folder.name)}",
            f"hydra.sweeper.job.varied=[{','.join(quote(key) for key in self.parameters)}]",
            *(f"hydra.sweeper.job.{key}={value}" for key, value in (told or {}).items()),
        ]


def quote(text: str) -> str:
    """The text as Hydra reads it back whole."""
    return QuotedString(text, Quote.single).with_quotes()


def name_of(parameters: Mapping[str, str]) -> str:
    """``lr=0.1,seed=2``: keys by their last part where that is unique, numbers to four digits."""
    short = short_keys(parameters)
    return ",".join(f"{short[key]}={_round(value)}" for key, value in parameters.items())


def short_keys(keys: Iterable[str]) -> dict[str, str]:
    """For each dotted key its shortest ending that no other has."""
    keys = list(keys)
    parts = {key: key.lstrip("+").replace("/", ".").split(".") for key in keys}
    short = {}
    for key in keys:
        own = parts[key]
        endings = [".".join(own[-length:]) for length in range(1, len(own) + 1)]
        others = [parts[other] for other in keys if other != key]
        short[key] = next(
            (e for n, e in enumerate(endings, 1) if all(o[-n:] != own[-n:] for o in others)), ".".join(own)
        )
    return short


def _round(value: str) -> str:
    try:
        return value if len(value) <= 6 else f"{float(value):.4g}"
    except ValueError:
        return value


def all_combinations(sweeps: Sequence[Override]) -> list[dict[str, str]]:
    """The parameters of every job of a grid; the last parameter changes fastest.

    Raises:
        UserError: an interval, which has no list of values.
    """
    values: dict[str, list[str]] = {}
    for sweep in sweeps:
        if not sweep.is_discrete_sweep():
            raise UserError(
                f"{sweep.input_line} has no end of values to try: type values ({sweep.get_key_element()}=0.1,0.01) or "
                "range(START, STOP, STEP), or search with sweep=optuna"
            )
        values[sweep.get_key_element()] = list(sweep.sweep_string_iterator())
    return [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())]
