"""The verdict names what was made slow, and nothing where nothing is."""

from dataclasses import replace

import pytest

from project.tracking.diagnosis import Diagnosis, diagnose
from project.tracking.remedies import Facts
from project.tracking.windows import Ranks, Window

BALANCED = Window(
    steps=100, samples=6400, wall_s=2.0, data=0.1, transfer=0.1, forward=6, backward=12, optimizer=1.5, other=0.3,
    sync=0.8, late=0.2, step_max=25,
)  # fmt: skip
NAN = float("nan")


def judge(*windows: Window, facts: Facts = Facts()) -> Diagnosis:  # noqa: B008
    return diagnose(Ranks.of(windows), facts)


def bound(*windows: Window, facts: Facts = Facts()) -> str:  # noqa: B008
    return judge(*windows, facts=facts).bound


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


@pytest.mark.parametrize(("data", "expected"), [(0.2, "compute"), (0.9, "input"), (1.1, "input")])
def test_data_that_come_as_fast_as_from_a_queue_are_no_bound_unless_they_take_a_good_part(
    data: float, expected: str
) -> None:
    tiny = Window(steps=100, samples=6400, wall_s=0.2, data=data, forward=0.6, backward=0.9, optimizer=0.3, other=0.1)
    assert bound(tiny) == expected
    assert bound(replace(tiny, forward=0.1, backward=0.1, optimizer=0.1, data=0.19)) == "input"


def test_of_several_limits_that_are_passed_the_largest_part_counts() -> None:
    assert bound(replace(BALANCED, data=3, other=20)) == "host"
    assert bound(replace(BALANCED, data=30, other=20)) == "input"


def test_waiting_for_one_slow_rank_is_no_synchronisation() -> None:
    slow = replace(BALANCED, backward=32, sync=0.8, late=20)
    waits = replace(BALANCED, backward=32, sync=20.8, late=0)
    diagnosis = judge(waits, slow, waits)
    assert (diagnosis.bound, diagnosis.rank, diagnosis.phase) == ("straggler", 1, "backward")
    assert "rank 1 holds the others up by 20.0 ms" in diagnosis.evidence


def test_ranks_that_are_held_up_in_turns_are_not_called_bound_by_what_little_they_compute() -> None:
    here = replace(BALANCED, forward=2, backward=14, optimizer=1, sync=12, other=20, late=2)
    there = replace(BALANCED, forward=20, backward=2, optimizer=1, sync=0, other=2, late=2)
    diagnosis = judge(here, there)
    assert diagnosis.bound == "unknown"
    assert diagnosis.hint is not None
    assert "in turns" in diagnosis.hint


@pytest.mark.parametrize("phase", ["data", "transfer", "forward", "optimizer", "other"])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_stragglers_phase_is_named(rank: int, phase: str) -> None:
    waits = replace(BALANCED, backward=32, sync=20.8, late=0)
    windows = [waits, waits]
    windows[rank] = replace(BALANCED, **{phase: getattr(BALANCED, phase) + 20}, late=20)
    diagnosis = judge(*windows)
    assert (diagnosis.bound, diagnosis.rank, diagnosis.phase) == ("straggler", rank, phase)


def test_the_phase_is_not_guessed_where_waiting_hides_it() -> None:
    """Under FSDP all ranks are in forward for as long as the slowest one."""
    windows = [replace(BALANCED, forward=26, sync=NAN, late=late) for late in (0, 20)]
    diagnosis = judge(*windows)
    assert (diagnosis.bound, diagnosis.rank, diagnosis.phase) == ("straggler", 1, None)


def test_two_ranks_that_are_equally_late_are_no_straggler() -> None:
    windows = [replace(BALANCED, late=late) for late in (0, 12, 0, 12)]
    assert bound(*windows) != "straggler"


def test_a_rank_that_is_late_while_all_send_for_longer_is_no_straggler() -> None:
    windows = [replace(BALANCED, backward=112, sync=100, late=late) for late in (0, 40)]
    assert bound(*windows) == "synchronisation"


def test_the_gain_is_what_is_left_without_the_part() -> None:
    half = replace(BALANCED, data=20, transfer=0, forward=5, backward=12.5, optimizer=2, other=0.5)
    assert judge(half).gain == pytest.approx(2)
    assert judge(BALANCED).gain == 1


@pytest.mark.parametrize("ddp_measures", [True, False], ids=["ddp", "phases"])
def test_a_straggler_is_named_where_the_times_of_meeting_are_not_known_but_less_surely(
    ddp_measures: bool,
) -> None:
    unknown = replace(BALANCED, late=NAN, **({} if ddp_measures else {"sync": NAN}))
    waits = replace(unknown, backward=32, **({"sync": 20.8} if ddp_measures else {}))
    slow = replace(unknown, data=20.1)
    diagnosis = judge(waits, waits, slow, waits)
    assert (diagnosis.bound, diagnosis.rank, diagnosis.phase) == ("straggler", 2, "data")
    assert not diagnosis.is_sure
    assert "(likely" in diagnosis.lines()[0]
    assert judge(replace(waits, late=0), replace(slow, late=20)).is_sure


def test_a_straggler_is_only_what_costs_most() -> None:
    """All wait 30 ms for their loaders, one rank 10 ms longer."""
    windows = [replace(BALANCED, data=data, backward=12 + 40 - data, late=data - 30) for data in (30, 40, 30)]
    assert bound(*windows) == "input"


def test_how_many_times_as_long_a_straggler_is_busy_is_told() -> None:
    waits = replace(BALANCED, backward=32, sync=20.8, late=0)
    diagnosis = judge(waits, waits, replace(BALANCED, forward=26, late=20))
    assert diagnosis.factor == pytest.approx(2, rel=0.01)


def test_a_rank_without_steps_does_not_shift_the_others() -> None:
    nothing = replace(BALANCED, steps=0, data=0, transfer=0, forward=0, backward=0, optimizer=0, other=0, late=NAN)
    waits = replace(BALANCED, backward=32, sync=20.8, late=0)
    assert judge(nothing, waits, replace(BALANCED, optimizer=21.5, late=20)).rank == 2
    assert bound(nothing, BALANCED, BALANCED) == "compute"


def test_operations_that_cost_what_the_smallest_cost_are_the_hosts() -> None:
    """1,000 of 11 us are 11 of the 18 ms of forward and backward."""
    facts = Facts(
        num_operations=1000, operation_us=11, can_compile=True, batch_size=64, data_keys=frozenset({"batch_size"})
    )
    diagnosis = judge(BALANCED, facts=facts)
    assert diagnosis.bound == "host"
    assert "1000 operations a step take 11 us each" in diagnosis.evidence
    assert diagnosis.remedies == ("model.compile=true", "data.batch_size=128")
    assert bound(BALANCED, facts=replace(facts, num_operations=100)) == "compute"


@pytest.mark.parametrize("name", ["buffers", "shards"])
def test_what_ranks_send_besides_gradients_is_synchronisation(name: str) -> None:
    assert bound(*[replace(BALANCED, **{name: 8})] * 2) == "synchronisation"


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        ({"data": 9.0}, "data.num_workers=4"),
        ({"transfer": 9.0}, "data.pin_memory=true"),
        ({"backward": 30.0, "sync": 20.0}, "trainer.accumulate_grad_batches=4"),
        ({"other": 30.0}, "trainer.log_every_n_steps=100"),
        ({}, "trainer.precision=bf16-mixed"),
    ],
)
def test_the_first_remedy_is_for_what_bounds_the_run(change: dict[str, float], remedy: str) -> None:
    facts = Facts(cores=8, on_gpu=True, data_keys=frozenset({"num_workers", "pin_memory"}))
    assert judge(replace(BALANCED, **change), facts=facts).remedies[0] == remedy


def test_a_straggler_in_data_gets_what_helps_a_loader() -> None:
    facts = Facts(cores=4, ranks_here=2, data_keys=frozenset({"num_workers"}))
    waits = replace(BALANCED, backward=32, sync=20.8, late=0)
    assert judge(waits, replace(BALANCED, data=20, late=20), facts=facts).remedies == ("data.num_workers=2",)
    assert judge(waits, replace(BALANCED, optimizer=21.5, late=20), facts=facts).remedies == ()


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        ([replace(BALANCED, backward=30, sync=20)] * 4, "synchronisation"),
        ([replace(BALANCED, backward=32, sync=20.8, late=0), replace(BALANCED, forward=26, late=20)] * 2, "unknown"),
        (
            [*[replace(BALANCED, backward=32, sync=20.8, late=0)] * 3, replace(BALANCED, forward=26, late=20)],
            "straggler",
        ),
        ([BALANCED] * 4, "compute"),
    ],
)
def test_ranks_that_take_turns_on_too_few_cores_are_told_so_first(windows: list[Window], expected: str) -> None:
    crowded = Facts(cores=2, ranks_here=4, batch_size=64, can_compile=True)
    diagnosis = judge(*windows, facts=crowded)
    assert diagnosis.bound == expected
    assert diagnosis.evidence.startswith("4 ranks take turns on 2 cores: ")
    assert diagnosis.remedies[0] == "trainer.devices=2"
    for enough in (replace(crowded, cores=4), replace(crowded, on_gpu=True)):
        assert "take turns" not in judge(*windows, facts=enough).evidence
        assert "trainer.devices=2" not in judge(*windows, facts=enough).remedies


def test_a_loader_is_what_bounds_a_run_on_however_few_cores() -> None:
    waits = judge(*[replace(BALANCED, data=20)] * 4, facts=Facts(cores=2, ranks_here=4))
    assert waits.bound == "input"
    assert "take turns" not in waits.evidence


def test_more_threads_than_cores_are_told_too() -> None:
    diagnosis = judge(BALANCED, BALANCED, facts=Facts(cores=4, ranks_here=2, threads=4))
    assert diagnosis.evidence.startswith("8 threads of 2 ranks take turns on 4 cores: ")
    assert diagnosis.remedies == ("launch.threads_per_rank=2",)


def test_nothing_measured_is_told_so() -> None:
    assert bound() == bound(replace(BALANCED, steps=0)) == "unknown"


def test_the_lines_say_what_and_what_to_type() -> None:
    advice = ("a=1", "data.batch_size=2", "model.compile=true")
    lines = Diagnosis("input", "half of it", 2.0, advice, "look there").lines()
    first = "bound by input: half of it, at most 2.00 times as fast without it"
    assert lines == [
        first,
        "  try a=1",
        "  try data.batch_size=2 (changes what is trained)",
        "  try model.compile=true (for longer trainings: it compiles before they begin)",
        "  look there",
    ]
