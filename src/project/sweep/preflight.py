"""A whole sweep that can't work, told once and before there is a folder: its jobs would fail one by one."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from project.config.composition import explain
from project.config.unread_keys import check_added
from project.errors import UserError, sentence
from project.launch import devices
from project.sweep.space import bounds

# Launchers whose jobs find the devices that are found here.
HERE = (".BasicLauncher", ".JoblibLauncher")
DECIDES = ("monitor", "mode")
SHOWN = 10  # jobs with their reasons, at most


def check_compared(sweeps: Sequence[Override], objectives: object) -> None:
    """Check that jobs which are compared by what they monitor monitor the same.

    Raises:
        UserError: the sweep varies it.
    """
    varied = [sweep.input_line for sweep in sweeps if sweep.key_or_group in DECIDES]
    if varied and not objectives:
        raise UserError(
            f"{' '.join(map(str, varied))}: jobs are compared by what they monitor, so it must be the same in all: "
            "type one value, or what they are to be compared by instead, as in 'sweep.objectives={test/accuracy:max}'"
        )


def check_jobs(loader: ConfigLoader, master: DictConfig, fixed: list[str], sweeps: Sequence[Override]) -> None:
    """Check some jobs as each is checked when it runs, and print once what all would be told.

    Raises:
        UserError: all are refused in the same words, so the reason is not in what varies.
    """
    told: dict[str, None] = {}
    first, *others = _samples(sweeps)

    def refusal(chosen: Mapping[str, str]) -> str | None:
        return _refusal(loader, master, [*fixed, *(f"{key}={value}" for key, value in chosen.items())], told)

    reason = refusal(first)
    if reason is not None and all(reason == refusal(chosen) for chosen in others):
        raise UserError(reason)
    for chosen in others:
        if reason is None and any(key.endswith("_target_") and first[key] != value for key, value in chosen.items()):
            refusal(chosen)  # for what it tells of another class
    for line in told:
        print(line, flush=True)


def check_each(master: DictConfig, composed: Iterable[tuple[str, DictConfig]]) -> None:
    """Check every job of a grid, by its name and its config, and say at once which would be refused.

    Raises:
        UserError: all would be.
    """
    found = [(name, _refusal_of(copy.deepcopy(config), master, {})) for name, config in composed]
    refused = [f"  {name}: {reason}" for name, reason in found if reason is not None]
    lines = refused[:SHOWN] + [f"  and {len(refused) - SHOWN} more"] * (len(refused) > SHOWN)
    if refused and len(refused) == len(found):
        raise UserError("\n".join([f"all {len(found)} jobs of the sweep would be refused:", *lines]))
    if refused:
        print("\n".join([f"{len(refused)} of {len(found)} jobs will be refused:", *lines]), flush=True)


def _samples(sweeps: Sequence[Override]) -> list[dict[str, str]]:
    """What varies, in a job of the first values, in one of the last, and in one for each further choice."""
    values = {sweep.get_key_element(): _values(sweep) for sweep in sweeps}
    values = {key: found for key, found in values.items() if found}
    first = {key: found[0] for key, found in values.items()}
    last = {key: found[-1] for key, found in values.items()}
    choices = [sweep.get_key_element() for sweep in sweeps if sweep.is_choice_sweep()]
    return [first, last, *(first | {key: value} for key in choices for value in values.get(key, [])[1:])]


def _values(sweep: Override) -> list[str]:
    """All choices, or the ends of a range or interval; none of an empty one, of which others tell."""
    value = sweep.value()
    if isinstance(value, IntervalSweep):
        return [str(value.start), str(value.end)]
    if isinstance(value, RangeSweep):  # which may be of any length
        with suppress(ValueError):
            return [str(end) for end in bounds(value)[:2]]
        return []
    return list(sweep.sweep_string_iterator())


def _refusal(loader: ConfigLoader, master: DictConfig, overrides: list[str], told: dict[str, None]) -> str | None:
    """Why a job would be refused before it begins; None where it would not be, or for another reason than a mistake."""
    try:
        composed = loader.load_sweep_config(master, overrides)
    except Exception:  # told where all jobs are composed; in a search it may be of this one alone
        return None
    return _refusal_of(composed, master, told)


def _refusal_of(composed: DictConfig, master: DictConfig, told: dict[str, None]) -> str | None:
    """The same of a job's config, which this changes."""
    from project.launch.job import checked, count_ranks  # here: single runs import this module too

    command = str(master.hydra.job.config_name).partition("_")[0]  # evaluate_checkpoint is composed for evaluate
    is_here = str(master.hydra.launcher._target_).endswith(HERE) and devices.started_by() is None
    overrides = list(composed.hydra.overrides.task)
    with read_write(composed), open_dict(composed):
        del composed["hydra"]
        if not is_here and OmegaConf.select(composed, "trainer.accelerator") in ("auto", "gpu"):
            composed.trainer.accelerator = "cuda"  # what the other hosts have is not known
    try:
        if command != "train":  # the others have checks of their own
            check_added(composed, overrides, command)
            return None
        config = checked(composed, overrides, command, lambda line: told.setdefault(line))
        if is_here:
            count_ranks(config, command)
    except Exception as error:
        return sentence(error) or (explain(error, command) if isinstance(error, OmegaConfBaseException) else None)
    return None
