"""Who holds the others up, from times at which ranks come to collectives."""

import itertools

import pytest
import torch
from torch import Tensor

from project.tracking.lateness import lateness, median_of_others

STEPS, PER_STEP, WORK_S = 8, 5, 0.004
STEP_S = PER_STEP * WORK_S


def come(work_s: Tensor, waits: Tensor) -> Tensor:
    """When ranks come to collectives, (R, C), if they work so long before each, (R, C), and wait at some, (C - 1,)."""
    came = torch.empty_like(work_s)
    free = torch.full((len(work_s),), 1.7e9, dtype=torch.float64)  # seconds since 1970
    for number in range(work_s.shape[1]):
        came[:, number] = free + work_s[:, number]
        waited = number == work_s.shape[1] - 1 or bool(waits[number])
        free = came[:, number].max().expand(len(free)) if waited else came[:, number]
    return came


def of_delays(delays_s: tuple[float, ...], place: int, overlapped: bool) -> tuple[Tensor, Tensor]:
    """Each rank is delayed before one collective of each step; overlapped, only the last of a step is waited for."""
    work = torch.full((len(delays_s), STEPS * PER_STEP), WORK_S, dtype=torch.float64)
    work[:, place::PER_STEP] += torch.tensor(delays_s, dtype=torch.float64)[:, None]
    waits = torch.tensor(
        [not overlapped or number % PER_STEP == PER_STEP - 1 for number in range(STEPS * PER_STEP - 1)]
    )
    return come(work, waits), waits


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("place", range(PER_STEP))
@pytest.mark.parametrize(
    "delays_s",
    [(0, 0.04), (0.02, 0, 0), (0, 0.04, 0), (0, 0, 0.01, 0.03), (0, 0, 0, 0, 0.01, 0, 0)],
    ids=lambda delays: f"{len(delays)}_ranks",
)
def test_a_rank_is_late_by_what_it_holds_the_others_up(
    delays_s: tuple[float, ...], place: int, overlapped: bool
) -> None:
    came, waits = of_delays(delays_s, place, overlapped)
    late_s = lateness(came, waits) * (STEP_S + max(delays_s))
    assert late_s.tolist() == pytest.approx(list(delays_s), rel=0.2, abs=1e-4)


def test_waiting_hides_no_rank_under_accumulation() -> None:
    """Four batches between two exchanges of gradients: one collective a step, all of the delay before it."""
    work = torch.full((3, 30), 0.04, dtype=torch.float64)
    work[2] += 4 * 0.04
    waits = torch.ones(29, dtype=torch.bool)
    late = lateness(come(work, waits), waits)
    assert late.tolist() == pytest.approx([0, 0, 0.8], abs=0.01)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_noise_that_all_ranks_have_is_no_lateness(num_ranks: int) -> None:
    work = 0.004 + 0.004 * torch.rand(num_ranks, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    waits = torch.ones(127, dtype=torch.bool)
    assert float(lateness(come(work, waits), waits).max()) < 0.1


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8, 16])
def test_the_right_rank_is_found_in_noise(num_ranks: int) -> None:
    draw = torch.Generator().manual_seed(num_ranks)
    for place, overlapped, late_rank in itertools.product(range(PER_STEP), (False, True), range(min(num_ranks, 4))):
        work = WORK_S * (0.5 + torch.rand(num_ranks, STEPS * PER_STEP, dtype=torch.float64, generator=draw))
        work[late_rank, place::PER_STEP] += 0.02
        waits = torch.tensor([not overlapped or number % PER_STEP == 4 for number in range(STEPS * PER_STEP - 1)])
        late = lateness(come(work, waits), waits)
        assert int(late.argmax()) == late_rank
        assert float(late[late_rank]) > 0.3


def test_what_is_no_training_does_not_count() -> None:
    """Rank 0 writes a checkpoint between the collectives 3 and 4."""
    work = torch.full((3, 10), WORK_S, dtype=torch.float64)
    work[0, 4] += 5.0
    waits = torch.ones(9, dtype=torch.bool)
    came = come(work, waits)
    assert float(lateness(came, waits)[0]) > 0.9
    follows = torch.ones(9, dtype=torch.bool)
    follows[3] = False
    assert lateness(came, waits, follows).tolist() == pytest.approx([0, 0, 0], abs=1e-6)


def test_ranks_that_meet_in_groups_are_judged_together() -> None:
    """A mesh of 2 x 2: ranks meet in rows, then in columns; rank 3 works longer."""
    rows, columns = torch.tensor([0.0, 0.0, 1.0, 1.0]), torch.tensor([2.0, 3.0, 2.0, 3.0])
    groups = torch.stack([rows, columns] * 10, dim=1)
    came = torch.empty(4, 20, dtype=torch.float64)
    free = torch.zeros(4, dtype=torch.float64)
    for number in range(20):
        came[:, number] = free + WORK_S
        if number % 2 == 0:
            came[3, number] += 0.02
        group = groups[:, number]
        free = torch.stack([came[group == own, number].max() for own in group])
    late = lateness(came, torch.ones(19, dtype=torch.bool), groups=groups)
    assert int(late.argmax()) == 3
    assert late[:3].tolist() == pytest.approx([0, 0, 0], abs=1e-6)
    assert float(late[3]) == pytest.approx(0.02 / (2 * WORK_S + 0.02), rel=0.2)


@pytest.mark.parametrize("shape", [(1, 5), (2, 0), (2, 1), (3, 1)])
def test_lateness_of_one_rank_or_of_nothing_is_unknown(shape: tuple[int, int]) -> None:
    late = lateness(torch.zeros(shape, dtype=torch.float64), torch.ones(max(0, shape[1] - 1), dtype=torch.bool))
    assert late.shape == shape[:1]
    assert late.isnan().all()


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5, 8, 9])
def test_median_of_others_leaves_the_own_value_out(num_ranks: int) -> None:
    draw = torch.Generator().manual_seed(num_ranks)
    values = torch.randint(0, 5, (num_ranks, 40), generator=draw).double()  # many are equal
    medians = median_of_others(values)
    for rank in range(num_ranks):
        others = torch.cat([values[:rank], values[rank + 1 :]])
        assert (medians[rank] == others.median(dim=0).values).all()  # torch's is the lower of two
