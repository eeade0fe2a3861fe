"""What bounds a run, from the windows of all ranks: a verdict with its evidence and what to change. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from project.tracking import remedies
from project.tracking.lateness import median_of_others
from project.tracking.remedies import Facts, Remedies, price
from project.tracking.windows import Ranks


@dataclass(frozen=True)
class Diagnosis:
    """The verdict.

    Attributes:
        bound: ``input``, ``transfer``, ``compute``, ``synchronisation``, ``straggler``, ``host`` or ``unknown``.
        evidence: In numbers, one sentence.
        gain: How many times the throughput could be at most, if what bounds the run vanished.
        remedies: Overrides to type, the one that could gain most first.
        hint: Where no override helps, or not alone: what to look at.
        rank: The straggler.
        phase: In which the straggler loses its time, where that is known.
        factor: How many times as long as the others it is busy in a step.
        is_sure: Whether who is late was measured; else it is concluded from where the others wait.
        num_steps: That were measured.
    """

    bound: str
    evidence: str
    gain: float = 1.0
    remedies: Remedies = ()
    hint: str | None = None
    rank: int | None = None
    phase: str | None = None
    factor: float = 1.0
    is_sure: bool = True
    num_steps: int | None = None

    def lines(self) -> list[str]:
        """For people: what bounds the run, and what to type."""
        gain = f", at most {self.gain:.2f} times as fast without it" if self.gain > 1.005 else ""
        doubt = "" if self.is_sure else " (likely; the times at which ranks met are not known)"
        lines = [f"bound by {self.bound}: {self.evidence}{gain}{doubt}"]
        if self.num_steps is not None and self.num_steps < FEW_STEPS:
            lines.append(f"  a guess from {self.num_steps} steps: it takes {FEW_STEPS} to tell")
        lines += [f"  try {remedy}{price(remedy)}" for remedy in self.remedies]
        return lines + ([f"  {self.hint}"] if self.hint else [])


# Shares of a step from which on a part of it is what to change first. Data over 5 % and communication over 10 % are
# the limits at which the former PyTorch profiler plugin for TensorBoard gave its advice; the rest were found by trial.
LIMITS = {"input": 0.05, "transfer": 0.05, "synchronisation": 0.10, "host": 0.25, "straggler": 0.20}
# Where data wait no longer for a batch, the host's limit is theirs: out of the queue of workers that have it ready, 64
# small pictures took 1.8 ms on two cores, and workers then slow a run down.
FROM_QUEUE_MS = 1.0
COMPUTING = 0.5  # of a step, below which the rest of it goes to one part here and to another there
APART = 2.0  # a straggler is later than any other by this factor
BY_OPERATIONS = 0.5  # of forward and backward, from which on their operations, not what they compute, are the cost

OF_OTHERS = ("sync", "buffers", "shards")  # parts in which a rank waits for others

OF_CROWDING = ("synchronisation", "straggler", "unknown", "compute")  # what ranks that wait for a core look like

FEW_STEPS = 50  # of fewer, the first ones and a single hiccup are a large share

LOOK_AT_RANK = "compare rank_*.log and the ranks' curves, and look for another process or a slower device there"
LOOK_AT_HOST = (
    "the ranks wait for one another in turns, as where other work uses their cores: try again when it is quiet"
)
LOOK_AT_DATASET = "give the dataset a method __getitems__, which is asked for a whole batch at once"
LOOK_AT_TRANSFER = "what hooks do to a batch on its way to the device could be done in the dataset"


def diagnose(ranks: Ranks, facts: Facts) -> Diagnosis:
    """Judge a window of all ranks.

    What all ranks lose is the least that any loses: the rest is a straggler's, whose delay shows on others as waiting.
    Of all that is over its limit, the part that could gain most is the verdict.
    """
    stepped = ranks["steps"] > 0
    if not stepped.any():
        return Diagnosis("unknown", "no step was measured")
    verdict = _verdict(ranks, stepped, facts)
    if facts.is_crowded and verdict.bound in OF_CROWDING:
        verdict = _of_crowded_cores(verdict, facts)
    return replace(verdict, num_steps=int(ranks["steps"].max()))


def _of_crowded_cores(verdict: Diagnosis, facts: Facts) -> Diagnosis:
    """Who waits for a core seems to wait for whatever it does next, and holds up those that wait for it."""
    crowd = f"{facts.ranks_here} ranks" if facts.ranks_here > 1 else "1 rank"
    if facts.threads > 1:
        crowd = f"{facts.ranks_here * facts.threads} threads of {crowd}"
    evidence = f"{crowd} take turns on {facts.cores} core{'s' if facts.cores > 1 else ''}: {verdict.evidence}"
    first = remedies.against_crowding(facts)
    others = tuple(remedy for remedy in verdict.remedies if remedy not in first)
    hint = None if verdict.bound == "unknown" else verdict.hint
    return replace(verdict, evidence=evidence, remedies=first + others, hint=hint)


def _verdict(ranks: Ranks, stepped: Tensor, facts: Facts) -> Diagnosis:
    step = float(ranks.step()[stepped].mean())
    shares = {name: float(part[stepped].min()) / step for name, part in ranks.parts().items()}
    share_of_operations = _share_of_operations(shares, step, facts)
    lost = {
        "input": shares["data"],
        "transfer": shares["transfer"],
        "synchronisation": sum(shares.get(name, 0.0) for name in OF_OTHERS),
        "host": shares["other"] + share_of_operations,
    }
    straggler = _straggler(ranks, stepped, step)
    if straggler is not None:
        lost["straggler"] = 1 - 1 / straggler.gain
    limits = LIMITS | ({"input": LIMITS["host"]} if shares["data"] * step <= FROM_QUEUE_MS else {})
    over = [name for name, share in lost.items() if share > limits[name]]
    if not over:
        computing = sum(shares[name] for name in ("forward", "backward", "optimizer"))
        evidence = f"{computing:.0%} of a step of {step:.1f} ms is forward, backward and optimizer"
        if computing < COMPUTING:
            return Diagnosis(
                "unknown", f"only {evidence} on every rank, and no other part stands out", hint=LOOK_AT_HOST
            )
        return Diagnosis("compute", evidence, 1.0, remedies.against_computing(facts))
    bound = max(over, key=lost.__getitem__)
    if bound == "straggler":
        assert straggler is not None
        return _with_remedies(straggler, facts)
    what, advice, hint = _WHAT[bound]
    evidence = f"{lost[bound]:.0%} of a step of {step:.1f} ms {what}"
    if bound == "host" and share_of_operations > shares["other"]:
        evidence = (
            f"{facts.num_operations} operations a step take {facts.operation_us:.0f} us each, however small they are: "
            f"{share_of_operations:.0%} of a step of {step:.1f} ms"
        )
        return Diagnosis(bound, evidence, _gain(lost[bound]), remedies.against_host(facts, by_operations=True))
    return Diagnosis(bound, evidence, _gain(lost[bound]), advice(facts), hint)


_WHAT: dict[str, tuple[str, Callable[[Facts], Remedies], str | None]] = {
    "input": ("waits for the data loader", remedies.against_input, LOOK_AT_DATASET),
    "transfer": ("moves the batch to the device", remedies.against_transfer, LOOK_AT_TRANSFER),
    "synchronisation": (
        "waits for weights, gradients or buffers of other ranks, none of which is slow",
        remedies.against_synchronisation,
        None,
    ),
    "host": (
        "is spent in the loop, callbacks and logging",
        lambda facts: remedies.against_host(facts, by_operations=False),
        None,
    ),
}


def _gain(share: float) -> float:
    return 1 / max(1e-3, 1 - share)


def _share_of_operations(shares: dict[str, float], step: float, facts: Facts) -> float:
    """The share of a step that its operations take however little they compute, where that is most of them."""
    computing = shares["forward"] + shares["backward"]
    share = min(computing, facts.num_operations * facts.operation_us / 1e3 / step)
    return share if share > BY_OPERATIONS * computing else 0.0


def late_ms(ranks: Ranks) -> tuple[Tensor, bool]:
    """By how much each rank holds the others up in a step, (R,), and whether that was measured.

    Else it is concluded from DDP's own times: the rank for which all others wait does not wait. Without these, from
    the phases in which no rank waits for another.
    """
    if not ranks["late"].isnan().all():
        return ranks["late"].nan_to_num(0.0), True
    parts = ranks.parts()
    if "sync" in parts:
        return (median_of_others(parts["sync"][:, None])[:, 0] - parts["sync"]).clamp(min=0), False
    own = (parts["data"] + parts["transfer"])[:, None]
    return (own - median_of_others(own)).clamp(min=0)[:, 0], False


def _straggler(ranks: Ranks, stepped: Tensor, step: float) -> Diagnosis | None:
    if int(stepped.sum()) < 2:
        return None
    late, is_sure = late_ms(ranks)
    rank = int(late.argmax())
    latest = float(late[rank])
    late[rank] = -1.0
    if latest < LIMITS["straggler"] * step or latest < APART * float(late.max()):
        return None
    phase = _own_phase(ranks, rank, latest)
    where = f" in {phase}" if phase else ""
    evidence = f"rank {rank} holds the others up by {latest:.1f} ms of a step of {step:.1f} ms{where}"
    busy = ranks.busy()
    factor = float(busy[rank] / median_of_others(busy[:, None])[rank, 0].clamp(min=1e-6))
    gain = _gain(latest / step)
    return Diagnosis("straggler", evidence, gain, (), LOOK_AT_RANK, rank, phase, factor, is_sure)


def _with_remedies(straggler: Diagnosis, facts: Facts) -> Diagnosis:
    advice = remedies.against_input(facts) if straggler.phase == "data" else ()
    return replace(straggler, remedies=advice)


def _own_phase(ranks: Ranks, rank: int, late: float) -> str | None:
    """The phase in which a rank takes so much longer than the others; None where it is hidden in what all share."""
    excess = {
        name: float(part[rank] - median_of_others(part[:, None])[rank, 0])
        for name, part in ranks.parts().items()
        if name not in OF_OTHERS
    }
    phase = max(excess, key=excess.__getitem__)
    return phase if excess[phase] > 0.5 * late else None
