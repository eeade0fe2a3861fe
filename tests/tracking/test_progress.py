"""How far a training is, and how long it still takes."""

import math

import pytest

from project.tracking.progress import Progress


@pytest.mark.parametrize(
    ("progress", "share", "left"),
    [
        (Progress(30, 30, max_batches=120), 0.25, 90),
        (Progress(30, 30, max_steps=60), 0.5, 30),
        (Progress(30, 30, max_batches=120, max_steps=60), 0.5, 30),  # the first end counts
        (Progress(40, 10, max_batches=80), 0.5, 40),  # accumulation over 4 batches
        (Progress(40, 10, max_steps=30), 1 / 3, 80),
        (Progress(30, 60, max_batches=60), 0.5, 30),  # a GAN's two optimizers
        (Progress(30, 60, max_steps=240), 0.25, 90),
        (Progress(120, 120, max_batches=120), 1.0, 0),
        (Progress(0, 0, max_batches=10), 0.0, 10),
    ],
)
def test_share_and_batches_left(progress: Progress, share: float, left: float) -> None:
    assert progress.share() == pytest.approx(share)
    assert progress.batches_left() == pytest.approx(left)


def test_without_an_end_nothing_is_known() -> None:
    endless = Progress(5, 5)
    assert math.isnan(endless.share())
    assert math.isnan(endless.remaining_s(1.0, [], 5))


def test_validations_to_come_are_counted_and_the_first_is_no_measure() -> None:
    progress = Progress(40, 40, max_batches=100)
    assert progress.remaining_s(0.5, [], 40) == pytest.approx(30)
    # Four in 40 batches, so six in the 60 that are left.
    assert progress.remaining_s(0.5, [100.0, 2.0, 2.0, 2.0], 40) == pytest.approx(30 + 6 * 2)
    assert progress.remaining_s(0.5, [3.0], 40) == pytest.approx(30 + 1.5 * 3)
