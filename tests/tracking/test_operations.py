"""Operations of a step, and their least cost."""

import math

import torch
from torch import nn

from project.tracking.operations import OperationCost, count_operations


def test_each_node_of_the_graph_counts_once() -> None:
    x = torch.ones(3, requires_grad=True)
    shared = x * 2
    loss = (shared + shared.exp()).sum()  # mul, exp, add, sum
    assert count_operations(loss) == 4


def test_leaves_and_losses_without_a_graph_are_none() -> None:
    assert count_operations(torch.ones(())) == 0
    assert count_operations(nn.Linear(4, 4)(torch.ones(2, 4)).sum()) in (3, 2)  # addmm, perhaps a transpose, sum


def test_a_deep_graph_is_walked_without_recursion() -> None:
    x = torch.ones(1, requires_grad=True)
    y = x
    for _ in range(3000):
        y = y * 1.0
    assert count_operations(y) == 3000


def test_the_smallest_operation_takes_microseconds_whatever_the_grad_mode() -> None:
    cost = OperationCost()
    assert math.isnan(cost.us)
    with torch.no_grad():
        for step in range(OperationCost.STEPS):
            assert not cost.is_known, step
            cost.measure()
    assert cost.is_known
    assert 0.5 < cost.us < 1000
