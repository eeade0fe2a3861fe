"""What bounds a run, from the windows of all ranks: a verdict with its evidence and what to change. Pure Python."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from project.tracking.windows import Window


@dataclass(frozen=True)
class Facts:
    """What the rules must know of a run besides its times.

    Attributes:
        num_workers: Of the training loader.
        batch_size: Global.
        on_gpu: Whether the ranks compute on GPUs.
        strategy: Name of its class.
        precision: As the Trainer has it.
        compiled: Whether the net is compiled.
        cores: CPU cores of the host.
        ranks_per_host: Ranks that share them.
    """

    num_workers: int = 0
    batch_size: int = 0
    on_gpu: bool = False
    strategy: str = "auto"
    precision: str = "32-true"
    compiled: bool = False
    cores: int = 1
    ranks_per_host: int = 1


@dataclass(frozen=True)
class Diagnosis:
    """The verdict.

    Attributes:
        bound: ``input``, ``transfer``, ``compute``, ``synchronisation``, ``straggler``, ``host`` or ``unknown``.
        evidence: In numbers, one sentence.
        gain: How many times the throughput could be at most, if what bounds the run vanished.
        remedies: Overrides to type, the one that could gain most first.
        rank: The straggler.
        phase: In which the straggler loses its time, where that is known.
    """

    bound: str
    evidence: str
    gain: float = 1.0
    remedies: tuple[str, ...] = ()
    rank: int | None = None
    phase: str | None = None

    def lines(self) -> list[str]:
        """For people: what bounds the run, and what to type."""
        gain = f", at most {self.gain:.2f} times as fast without it" if self.gain > 1.005 else ""
        lines = [f"bound by {self.bound}: {self.evidence}{gain}"]
        lines += [f"  try {remedy}" for remedy in self.remedies]
        return lines


# Shares of a step from which on a part of it is what to change first. Data over 5 % and communication over 10 % are
# the limits at which the former PyTorch profiler plugin for TensorBoard gave its advice; the rest were found by trial.
DATA, TRANSFER, SYNC, OTHER = 0.05, 0.05, 0.10, 0.25
LATE = 0.20  # a rank that holds the others up by this share of a step is a straggler ...
APART = 2.0  # ... if it is later than any other by this factor

UNCOMPILED = ("DataParallelStrategy", "LayerSplitStrategy", "PipelineStrategy")  # they refuse model.compile=true


def diagnose(windows: Sequence[Window], facts: Facts) -> Diagnosis:
    """Judge a window of all ranks, in their order.

    A straggler comes first, because its delay shows on the others as waiting, and would be taken for something else.
    """
    windows = [window for window in windows if window.steps]
    if not windows:
        return Diagnosis("unknown", "no step was measured")
    step = sum(window.step for window in windows) / len(windows)
    shares = _shares(windows, step)
    straggler = _straggler(windows, step)
    # Ranks that have much to send come late to each other, now this one and now that.
    if straggler is not None and straggler.gain > 1 / max(1e-3, 1 - shares.get("sync", 0.0)):
        return straggler
    candidates = {
        "input": shares["data"] / DATA,
        "transfer": shares["transfer"] / TRANSFER,
        "synchronisation": shares.get("sync", 0.0) / SYNC,
        "host": shares["other"] / OTHER,
    }
    # Of all parts over their limits, the one that could gain most.
    of = {"input": "data", "transfer": "transfer", "synchronisation": "sync", "host": "other"}
    over = [name for name, ratio in candidates.items() if ratio > 1]
    if not over:
        compute = shares["forward"] + shares["backward"] + shares["optimizer"]
        evidence = f"{compute:.0%} of a step of {step:.1f} ms is forward, backward and optimizer"
        return Diagnosis("compute", evidence, 1.0, _faster(facts))
    bound = max(over, key=lambda name: shares[of[name]])
    share = shares[of[bound]]
    what = {
        "input": "waits for the data loader",
        "transfer": "moves the batch to the device",
        "synchronisation": "waits for the gradients of other ranks, none of which is slow",
        "host": "is spent in the loop, callbacks and logging",
    }[bound]
    remedies = {"input": _input, "transfer": _transfer, "synchronisation": _sync, "host": _host}[bound](facts)
    return Diagnosis(bound, f"{share:.0%} of a step of {step:.1f} ms {what}", 1 / max(1e-3, 1 - share), remedies)


def _shares(windows: Sequence[Window], step: float) -> dict[str, float]:
    """Each part's share of a step; what all ranks wait for each other is the least of their waits."""
    of_ranks = [window.parts() for window in windows]
    shares = {
        name: sum(parts[name] for parts in of_ranks) / len(of_ranks) / step for name in of_ranks[0] if name != "sync"
    }
    waits = [parts["sync"] for parts in of_ranks if "sync" in parts]
    if waits:
        shares["sync"] = min(waits) / step
    return shares


def _straggler(windows: Sequence[Window], step: float) -> Diagnosis | None:
    late = [0.0 if math.isnan(window.late) else window.late for window in windows]
    if len(windows) < 2:
        return None
    rank = max(range(len(late)), key=late.__getitem__)
    others = [value for other, value in enumerate(late) if other != rank]
    if late[rank] < LATE * step or late[rank] < APART * max(others):
        return None
    phase = _own_phase(windows, rank, late[rank])
    where = f" in {phase}" if phase else ""
    evidence = f"rank {rank} holds the others up by {late[rank]:.1f} ms of a step of {step:.1f} ms{where}"
    look = "compare rank_*.log and the ranks' curves, and look for another process or a slower device there"
    remedies = ("data.num_workers=4", look) if phase == "data" else (look,)
    return Diagnosis("straggler", evidence, 1 / max(1e-3, 1 - late[rank] / step), remedies, rank, phase)


def _own_phase(windows: Sequence[Window], rank: int, late: float) -> str | None:
    """The phase in which a rank takes so much longer than the others; None where it is hidden in what all share."""
    own = windows[rank].parts()
    excess = {}
    for name in own:
        if name == "sync":
            continue
        others = sorted(window.parts()[name] for other, window in enumerate(windows) if other != rank)
        excess[name] = own[name] - others[len(others) // 2]
    phase = max(excess, key=excess.__getitem__)
    return phase if excess[phase] > 0.5 * late else None


def _input(facts: Facts) -> tuple[str, ...]:
    free = max(1, facts.cores // facts.ranks_per_host)
    workers = 2 * facts.num_workers if facts.num_workers else min(4, max(2, free))
    advice = [f"data.num_workers={workers}"]
    if facts.num_workers:
        advice.append("data.prefetch_factor=4")
    advice.append("a dataset with __getitems__, which is asked for a whole batch at once")
    return tuple(advice)


def _transfer(facts: Facts) -> tuple[str, ...]:
    return ("data.pin_memory=true", f"data.num_workers={max(2, facts.num_workers)}")


def _sync(facts: Facts) -> tuple[str, ...]:
    advice = [f"data.batch_size={2 * facts.batch_size}"] if facts.batch_size else []
    advice.append("trainer.accumulate_grad_batches=4")
    advice.append(f"trainer/strategy={'ddp_bf16_compress' if facts.on_gpu else 'ddp_powersgd'}")
    return tuple(advice)


def _host(facts: Facts) -> tuple[str, ...]:
    advice = ["trainer.log_every_n_steps=100"]
    if facts.batch_size:
        advice.append(f"data.batch_size={2 * facts.batch_size}")
    return tuple(advice)


def _faster(facts: Facts) -> tuple[str, ...]:
    advice = []
    if facts.precision in ("32-true", "32"):
        advice.append("trainer.precision=bf16-mixed")
    if not facts.compiled and facts.strategy not in UNCOMPILED:
        advice.append("model.compile=true")
    advice.append("more devices: trainer.devices=N")
    return tuple(advice)
