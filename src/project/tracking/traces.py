"""Traces of single steps by PyTorch's profiler: which steps on which ranks, how they are asked for, and their files."""

from __future__ import annotations

import gzip
import os
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch.profiler import ProfilerActivity, profile, record_function
from yaml import YAMLError

from project.errors import UserError, did_you_mean
from project.files import beside

WRITING_S = 0.05  # from the making of a small file to its text, at most
QUIET = "9"  # or the library below the profiler tells on the console that it starts and stops
COMPRESSION = 3  # a twentieth of the size in a third of the time of the default
MOST_STEPS = 1_000  # of a trace
NO_TABLE = "PyTorch could not read the names of its events this time; the trace has them all."


@dataclass(frozen=True)
class TracePlan:
    """Which ranks record which steps.

    Attributes:
        ranks: Global ranks, or ``all``.
        wait: Steps before, also between two traces.
        warmup: Steps that are traced and dropped, since the profiler's first ones are slow.
        active: Steps that are recorded, at most 1,000, since they are kept in memory.
        repeat: How many traces.
        record_shapes: With the shapes of all operations' inputs.
        profile_memory: With what is allocated and freed.
        with_stack: With lines of Python.

    Raises:
        UserError: a value can't be.
    """

    ranks: tuple[int, ...] | Literal["all"] = (0,)
    wait: int = 0
    warmup: int = 2
    active: int = 3
    repeat: int = 1
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False

    def __post_init__(self) -> None:
        for name, least in (("wait", 0), ("warmup", 0), ("active", 1), ("repeat", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UserError(f"{name}={value} of a trace can't be: type {name}= with a whole number from {least}")
        if self.active > MOST_STEPS:
            raise UserError(f"active={self.active} of a trace can't be: type active= with at most {MOST_STEPS} steps")
        for name in ("record_shapes", "profile_memory", "with_stack"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"{name}={getattr(self, name)} of a trace can't be: type {name}=true or {name}=false")
        ranks: Any = self.ranks  # as it was written somewhere
        if ranks != "all" and not (isinstance(ranks, tuple) and ranks and all(map(_is_rank, ranks))):
            given = list(ranks) if isinstance(ranks, tuple) else ranks
            raise UserError(f"ranks={given} of a trace can't be: type ranks=all, or a list of global ranks as [0,3]")

    def changed(self, values: Mapping[str, Any]) -> TracePlan:
        """The plan with some of its values replaced, ``ranks`` as a list.

        Raises:
            UserError: a name is unknown, or a value can't be.
        """
        names = [field.name for field in fields(self)]
        for name in values:
            if name not in names:
                hint = did_you_mean(name, names) or f": type some of {', '.join(names)}"
                raise UserError(f"{name}= is nothing that a trace can be asked for with{hint}")
        ranks = values.get("ranks", self.ranks)
        return replace(self, **{**values, "ranks": tuple(ranks) if isinstance(ranks, list) else ranks})

    def check_ranks(self, world_size: int) -> None:
        """Check that its ranks are there.

        Raises:
            UserError: one is not.
        """
        missing = [rank for rank in self.ranks if isinstance(rank, int) and rank >= world_size]
        if missing:
            there = "rank 0" if world_size == 1 else f"ranks 0 to {world_size - 1}"
            raise UserError(f"ranks={list(self.ranks)} of a trace can't be, this run has {there}: type ranks=all")

    def records(self, rank: int) -> bool:
        return self.ranks == "all" or rank in self.ranks


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


class Demand:
    """The file by which a running job is asked for a trace; empty, or with values of a plan: ``active=5 ranks=[0,3]``.

    Args:
        path: Of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_heeded = True

    def is_there(self) -> bool:
        return self._is_heeded and os.path.exists(self.path)  # noqa: PTH110 (says no where pathlib fails)

    def take(self) -> str:
        """The file's text; the file is gone then.

        Raises:
            UserError: it can't be read or removed, and is not looked at again.
        """
        try:
            if not (text := self.path.read_text()):
                time.sleep(WRITING_S)
                text = self.path.read_text()
            self.path.unlink()
        except (OSError, UnicodeDecodeError) as error:
            if isinstance(error, UnicodeDecodeError):
                self.path.unlink(missing_ok=True)
                raise UserError(f"{self.path} is no text: write active=5 ranks=[0,1], or nothing") from error
            self._is_heeded = False
            raise UserError(
                f"{self.path} can't be read and removed ({error.strerror}), and is not looked at again"
            ) from error
        return text


def demanded(text: str, plan: TracePlan) -> TracePlan:
    """The plan, changed as the text of a file says.

    Raises:
        UserError: the text says what can't be.
    """
    try:
        values = OmegaConf.to_container(OmegaConf.from_dotlist(text.split()))
    except (OmegaConfBaseException, YAMLError) as error:
        raise UserError(
            f"a trace can't be asked for by {text.strip()!r}: write active=5 ranks=[0,1], or nothing"
        ) from error
    assert isinstance(values, dict)
    return plan.changed({str(name): value for name, value in values.items()})


class Spans:
    """Names of what runs, one within the other, that a trace shows."""

    def __init__(self) -> None:
        self._open: list[record_function] = []

    def enter(self, name: str) -> None:
        span = record_function(name)
        span.__enter__()  # type: ignore[no-untyped-call]
        self._open.append(span)

    def leave(self) -> None:
        if self._open:
            self._open.pop().__exit__(None, None, None)

    def close(self) -> None:
        while self._open:
            self.leave()


class Recorder:
    """One trace of this rank: warms up, then records step after step.

    Args:
        plan: What is recorded.
        on_cuda: Whether the device's kernels are, too.

    Raises:
        RuntimeError: another profiler is recording in this process; from all methods.
    """

    def __init__(self, plan: TracePlan, on_cuda: bool) -> None:
        self._activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
        self._sort_by = "self_device_time_total" if on_cuda else "self_cpu_time_total"
        self._profile = profile(
            activities=self._activities,
            record_shapes=plan.record_shapes,
            profile_memory=plan.profile_memory,
            with_stack=plan.with_stack,
        )
        self._is_recording = False
        self.spans = Spans()
        os.environ.setdefault("KINETO_LOG_LEVEL", QUIET)
        self._profile.prepare_trace()  # from here on it warms up

    def begin_step(self, step: int) -> None:
        """The step before, if there was one, ends."""
        if not self._is_recording:
            self._profile.start_trace()
            self._is_recording = True
        self.spans.close()
        self.spans.enter(f"ProfilerStep#{step}")  # the name by which tools know steps

    def record(self, is_on: bool) -> None:
        """Leave out what is not part of a step, such as a validation."""
        if self._is_recording:
            self._profile.toggle_collection_dynamic(is_on, self._activities)

    def end(self) -> None:
        """Record no more; what is still warming up is dropped."""
        self.spans.close()
        if not self._is_recording:
            self._profile.start_trace()
        self._profile.stop_trace()
        self._is_recording = False

    def save(self, path: Path) -> None:
        """Write what was recorded, for Perfetto: whole, or not at all.

        Raises:
            OSError: it can't be written.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        plain = path.with_name(f"{path.name}.plain")
        try:
            self._profile.export_chrome_trace(str(plain))
            _check_whole(plain)
            with beside(path) as written, plain.open("rb") as source, gzip.open(written, "wb", COMPRESSION) as target:
                shutil.copyfileobj(source, target)
        finally:
            for left in (plain, plain.with_name(f"{plain.name}.tmp")):  # the second is the profiler's own
                left.unlink(missing_ok=True)

    def table(self, rows: int) -> str:
        """The operations that took the most time, with those that they called not counted."""
        try:
            averages = self._profile.key_averages()
        except UnicodeDecodeError:  # torch 2.13, now and then: and with stacks alone: the name of an event is no text
            return NO_TABLE
        return str(averages.table(sort_by=self._sort_by, row_limit=rows, max_name_column_width=60))


def _check_whole(path: Path) -> None:
    """The profiler does not raise where the disk is full: its file is gone then, or ends somewhere."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 64))
        if file.read().rstrip().endswith(b"}"):
            return
    free = shutil.disk_usage(path.parent).free / 2**20
    raise OSError(f"the file could not be written, {free:.0f} MiB are free in {path.parent}")
