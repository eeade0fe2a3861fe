"""The forward of each replica of dp."""

import time

import pytest
import torch

from project.tracking.replicas import Replicas


def test_each_replicas_forward_is_a_mean_over_steps() -> None:
    replicas = Replicas()
    for _ in range(2):
        for index, delay_s in enumerate((0.002, 0.02)):
            with replicas.observe(index, torch.device("cpu")):
                time.sleep(delay_s)
    fast, slow = replicas.take(steps=2)
    assert 2 <= fast < slow
    assert 20 <= slow < 200
    assert replicas.take(steps=1) == []


def test_validation_does_not_count_and_errors_pass() -> None:
    replicas = Replicas()
    with torch.no_grad(), replicas.observe(0, torch.device("cpu")):
        pass
    with pytest.raises(KeyError), replicas.observe(1, torch.device("cpu")):
        raise KeyError("of the net")
    assert len(replicas.take(1)) == 1
