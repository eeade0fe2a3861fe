"""Random numbers of a sample's own."""

import torch

from project.data.draws import sample_seeds, uniforms

INDICES = torch.arange(20_000)


def test_a_sample_draws_the_same_in_any_batch() -> None:
    together = uniforms(sample_seeds(7, INDICES[:10]), 4)
    assert torch.equal(uniforms(sample_seeds(7, torch.tensor([3])), 4)[0], together[3])
    assert torch.equal(uniforms(sample_seeds(7, INDICES[:10].flip(0)), 4), together.flip(0))


def test_other_samples_and_other_epochs_draw_others() -> None:
    seeds = torch.cat([sample_seeds(epoch, INDICES) for epoch in (0, 1, 2**62 - 1)])
    assert len(seeds.unique()) == 3 * len(INDICES)
    assert len(uniforms(seeds, 2).unique()) > 0.9999 * 2 * len(seeds)


def test_numbers_are_uniform_and_those_of_neighbours_have_nothing_in_common() -> None:
    numbers = uniforms(sample_seeds(0, INDICES), 3)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    # 4 standard errors: of a mean, sqrt(1 / 12 / N); of a correlation, sqrt(1 / N).
    assert (numbers.mean(0) - 0.5).abs().max() < 4 * (1 / 12 / len(INDICES)) ** 0.5
    pairs = torch.cat([numbers[:-1], numbers[1:]], dim=1).T
    correlations = torch.corrcoef(pairs) - torch.eye(6)
    assert correlations.abs().max() < 4 / len(INDICES) ** 0.5


def test_numbers_are_those_of_splitmix64() -> None:
    # The first three for seed 1234567, from the public reference vectors of the generator.
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    drawn = uniforms(torch.tensor([1234567]), 3)[0]
    assert drawn.tolist() == [(number >> 11) * 2.0**-53 for number in expected]
