"""The verdict names what was made slow, and nothing where nothing is."""

import itertools
import random
from dataclasses import replace

import pytest

from project.tracking.diagnosis import Diagnosis, Facts, diagnose
from project.tracking.windows import Window

BALANCED = Window(100, 6400, 2.0, 0.1, 0.1, 6, 12, 1.5, 0.3, sync=0.8, late=0.2, step_max=25)


def bound(*windows: Window, facts: Facts = Facts()) -> str:  # noqa: B008
    return diagnose(windows, facts).bound


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_no_alarm_on_a_balanced_run(ranks: int) -> None:
    assert bound(*[BALANCED] * ranks) == "compute"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"data": 8.0}, "input"),
        ({"transfer": 4.0}, "transfer"),
        ({"other": 15.0}, "host"),
        ({"backward": 30.0, "sync": 20.0}, "synchronisation"),
    ],
)
def test_what_takes_the_time_bounds_the_run(change: dict[str, float], expected: str) -> None:
    assert bound(*[replace(BALANCED, **change)] * 2) == expected


def test_of_several_limits_that_are_passed_the_largest_part_counts() -> None:
    assert bound(replace(BALANCED, data=3, other=20)) == "host"
    assert bound(replace(BALANCED, data=30, other=20)) == "input"


def test_waiting_for_one_slow_rank_is_no_synchronisation() -> None:
    slow = replace(BALANCED, backward=32, sync=0.8, late=20)
    waits = replace(BALANCED, backward=32, sync=20.8, late=0)
    diagnosis = diagnose([waits, slow, waits], Facts())
    assert (diagnosis.bound, diagnosis.rank, diagnosis.phase) == ("straggler", 1, "backward")
    assert "rank 1 holds the others up by 20.0 ms" in diagnosis.evidence


@pytest.mark.parametrize("phase", ["data", "transfer", "forward", "optimizer", "other"])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_stragglers_phase_is_named(rank: int, phase: str) -> None:
    waits = replace(BALANCED, backward=32, sync=20.8, late=0)
    windows = [waits, waits]
    windows[rank] = replace(BALANCED, **{phase: getattr(BALANCED, phase) + 20}, late=20)
    diagnosis = diagnose(windows, Facts())
    assert (diagnosis.bound, diagnosis.rank, diagnosis.phase) == ("straggler", rank, phase)


def test_the_phase_is_not_guessed_where_waiting_hides_it() -> None:
    """Under FSDP all ranks are in forward for as long as the slowest one."""
    windows = [replace(BALANCED, forward=26, sync=float("nan"), late=late) for late in (0, 20)]
    diagnosis = diagnose(windows, Facts())
    assert (diagnosis.bound, diagnosis.rank, diagnosis.phase) == ("straggler", 1, None)


def test_two_ranks_that_are_equally_late_are_no_straggler() -> None:
    windows = [replace(BALANCED, late=late) for late in (0, 12, 0, 12)]
    assert bound(*windows) != "straggler"


def test_a_rank_that_is_late_while_all_send_for_longer_is_no_straggler() -> None:
    windows = [replace(BALANCED, backward=112, sync=100, late=late) for late in (0, 40)]
    assert bound(*windows) == "synchronisation"


def test_the_gain_is_what_is_left_without_the_part() -> None:
    half = replace(BALANCED, data=20, transfer=0, forward=5, backward=12.5, optimizer=2, other=0.5)
    assert diagnose([half], Facts()).gain == pytest.approx(2)
    assert diagnose([BALANCED], Facts()).gain == 1


@pytest.mark.parametrize(
    ("change", "facts", "remedy"),
    [
        ({"data": 9.0}, Facts(cores=8), "data.num_workers=4"),
        ({"data": 9.0}, Facts(cores=2), "data.num_workers=2"),
        ({"data": 9.0}, Facts(num_workers=3), "data.num_workers=6"),
        ({"transfer": 9.0}, Facts(), "data.pin_memory=true"),
        ({"backward": 30.0, "sync": 20.0}, Facts(batch_size=64), "data.batch_size=128"),
        ({"other": 30.0}, Facts(), "trainer.log_every_n_steps=100"),
        ({}, Facts(precision="32-true"), "trainer.precision=bf16-mixed"),
        ({}, Facts(precision="bf16-mixed"), "model.compile=true"),
        ({}, Facts(precision="bf16-mixed", strategy="PipelineStrategy"), "more devices: trainer.devices=N"),
    ],
)
def test_remedies_are_what_to_type_for_this_run(change: dict[str, float], facts: Facts, remedy: str) -> None:
    remedies = diagnose([replace(BALANCED, **change)], facts).remedies
    assert remedies[0] == remedy


@pytest.mark.parametrize("gpu", [True, False])
def test_remedies_for_synchronisation_run_on_these_devices(gpu: bool) -> None:
    remedies = diagnose([replace(BALANCED, backward=30, sync=20)] * 2, Facts(on_gpu=gpu)).remedies
    assert ("trainer/strategy=ddp_bf16_compress" in remedies) is gpu
    assert ("trainer/strategy=ddp_powersgd" in remedies) is not gpu


def test_nothing_measured_is_told_so() -> None:
    assert bound() == bound(replace(BALANCED, steps=0)) == "unknown"


def test_the_lines_say_what_and_what_to_type() -> None:
    lines = Diagnosis("input", "half of it", 2.0, ("a=1", "b=2")).lines()
    assert lines == ["bound by input: half of it, at most 2.00 times as fast without it", "  try a=1", "  try b=2"]


def test_most_of_many_random_runs_are_judged_rightly() -> None:
    """Other step times, rank counts and severities than above, with noise on every number."""
    draw = random.Random(5)
    kinds = ("input", "transfer", "synchronisation", "host", "straggler", "compute")
    right = total = 0
    for kind, ranks in itertools.product(kinds, (2, 3, 4, 6, 8, 12, 16)):
        compute = draw.uniform(3, 200)
        part = compute * draw.uniform(0.4, 2.0)  # of what is made slow
        slow_rank = draw.randrange(ranks)
        windows = []
        for rank in range(ranks):

            def noisy(value: float) -> float:
                return value * draw.uniform(0.95, 1.05)

            waits = part if kind == "straggler" and rank != slow_rank else 0.0
            windows.append(
                Window(
                    50, 1000, 1.0,
                    data=noisy(part if kind == "input" else 0.01 * compute),
                    transfer=noisy(part if kind == "transfer" else 0.005 * compute),
                    forward=noisy(0.3 * compute + (part if kind == "straggler" and rank == slow_rank else 0.0)),
                    backward=noisy(0.6 * compute) + waits + (part if kind == "synchronisation" else 0.0),
                    optimizer=noisy(0.1 * compute),
                    other=noisy(part + 0.3 * compute if kind == "host" else 0.03 * compute),
                    sync=noisy(part if kind == "synchronisation" else 0.02 * compute) + waits,
                    late=part if kind == "straggler" and rank == slow_rank else draw.uniform(0, 0.04) * compute,
                )
            )  # fmt: skip
        diagnosis = diagnose(windows, Facts())
        total += 1
        right += diagnosis.bound == kind and (kind != "straggler" or diagnosis.rank == slow_rank)
    assert total == 42
    assert right >= 40
