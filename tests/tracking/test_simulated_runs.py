"""Runs of many ranks, simulated from what each rank does to what the overview makes of it."""

import random
from dataclasses import dataclass

import pytest
import torch

from project.tracking.arrivals import Arrivals, Marks, of_entries
from project.tracking.diagnosis import Diagnosis
from project.tracking.overview import Overview
from project.tracking.phases import PHASES
from project.tracking.remedies import Facts
from project.tracking.windows import Window

STEPS, BUCKETS = 30, 3
NS = 1_000_000  # of a millisecond
USUAL = {"data": 0.01, "transfer": 0.005, "forward": 0.3, "backward": 0.6, "optimizer": 0.1, "other": 0.03}


@dataclass
class Rank:
    """What a rank notes while it runs."""

    now_ms: float
    totals_ms: dict[str, float]
    sync_ms: float
    entries: list[tuple[int, str, int, str]]
    marks: Marks
    at_ms: float = 0.0  # what its clock on the wall shows

    @classmethod
    def new(cls) -> "Rank":
        rank = cls(1000.0, dict.fromkeys(PHASES, 0.0), 0.0, [], Marks(lambda: 0))
        rank.marks = Marks(lambda: int(rank.at_ms * NS))
        return rank

    def spend(self, phase: str, ms: float) -> None:
        self.now_ms += ms
        self.totals_ms[phase] += ms


def run(num_ranks: int, shares: list[dict[str, float]], send: float, step_ms: float, draw: random.Random) -> Diagnosis:
    """Steps under DDP, with buckets that are sent while backward goes on.

    Args:
        num_ranks: R.
        shares: Of each rank, how long each phase takes, as a multiple of ``step_ms``; noise comes on top.
        send: How long gradients take on their way, once the last rank has come.
        step_ms: What a step would take without any fault.
        draw: Of the noise.
    """
    ranks = [Rank.new() for _ in range(num_ranks)]
    for step in range(STEPS):
        came = []
        for rank, share in zip(ranks, shares, strict=True):
            noisy = {name: step_ms * value * draw.uniform(0.9, 1.1) for name, value in share.items()}
            for name in ("data", "transfer", "forward"):
                rank.spend(name, noisy[name])
            rank.at_ms = rank.now_ms
            rank.marks.begin_backward()
            for bucket in range(BUCKETS):
                rank.spend("backward", noisy["backward"] / BUCKETS)
                number = BUCKETS * step + bucket
                rank.entries.append((int(rank.now_ms * NS), "gloo:all_reduce", number, "0"))
            came.append((rank.now_ms, noisy))
        ends_ms = max(rank.now_ms for rank in ranks) + send * step_ms
        for rank, (came_ms, noisy) in zip(ranks, came, strict=True):
            rank.sync_ms += ends_ms - came_ms
            rank.spend("backward", ends_ms - came_ms)
            rank.at_ms = rank.now_ms
            rank.marks.end_backward()
            rank.spend("optimizer", noisy["optimizer"])
            rank.spend("other", noisy["other"])
    arrivals = [of_entries(rank.entries, rank.marks) for rank in ranks]
    rows = torch.tensor([_row(*pair) for pair in zip(ranks, arrivals, strict=True)], dtype=torch.float64)
    overview = Overview(pytest.fail)
    overview.add(STEPS, rows, arrivals[0], Facts())
    diagnosis = overview.judge(STEPS, Facts())
    assert diagnosis is not None
    return diagnosis


def _row(rank: Rank, arrivals: Arrivals) -> list[float]:
    means = {name: total / STEPS for name, total in rank.totals_ms.items()}
    window = Window(steps=STEPS, samples=1, wall_s=1, sync=rank.sync_ms / STEPS, **means)
    return [*window.packed(), *arrivals.packed()]


CASES = (
    [("compute", None)] * 8
    + [("input", "data")] * 6
    + [("transfer", "transfer")] * 4
    + [("host", "other")] * 4
    + [("synchronisation", None)] * 6
    + [("straggler", name) for name in USUAL for _ in range(2)]
)


def test_most_of_many_random_runs_are_judged_rightly() -> None:
    """Other step times, ranks and severities than any that the limits were chosen by."""
    draw = random.Random(20)
    assert len(CASES) == 40
    wrong = []
    for number, (kind, phase) in enumerate(CASES):
        num_ranks = draw.choice((2, 3, 4, 5, 8, 16))
        step_ms = draw.uniform(3, 200)
        fault = draw.uniform(0.5, 2.0)
        slow_rank = draw.randrange(num_ranks)
        shares = [dict(USUAL) for _ in range(num_ranks)]
        for rank, share in enumerate(shares):
            if phase is not None and (kind != "straggler" or rank == slow_rank):
                share[phase] += fault
        verdict = run(num_ranks, shares, fault if kind == "synchronisation" else 0.03, step_ms, draw)
        expected = ("straggler", slow_rank, phase) if kind == "straggler" else (kind, None, None)
        if (verdict.bound, verdict.rank, verdict.phase) != expected:
            wrong.append((number, expected, verdict.lines()))
    assert len(wrong) <= 2, wrong


@pytest.mark.parametrize("num_ranks", [2, 3, 8, 32])
def test_ranks_that_only_differ_by_noise_are_no_stragglers(num_ranks: int) -> None:
    draw = random.Random(num_ranks)
    verdicts = {run(num_ranks, [dict(USUAL)] * num_ranks, 0.03, 20.0, draw).bound for _ in range(5)}
    assert verdicts == {"compute"}
