"""What a rank that goes on draws, where it is on another device than before."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from project.strategies.random_state import random_state
from project.training.rank_states import RankStates, _plain

CPU = torch.device("cpu")


def test_a_gpu_that_the_run_has_not_had_is_seeded_by_rank_and_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a run on the CPU goes on: else all ranks' GPUs would draw the same, and from the start again."""
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    of_rank = {"random": _plain(random_state(CPU)), "metrics": {}, "results": {}, "callbacks": {}}
    expected = torch.rand(2)
    for rank, step in ((0, 10), (1, 10), (0, 20)):
        states = RankStates(seed=3)
        states._loaded = {"of_ranks": [of_rank] * 2}
        trainer = Mock(world_size=2, global_rank=rank, global_step=step, strategy=SimpleNamespace(root_device=CPU))
        states.on_train_start(trainer, nn.Linear(1, 1))  # type: ignore[arg-type]
        assert torch.equal(torch.rand(2), expected)
    assert len(set(seeds)) == 3
