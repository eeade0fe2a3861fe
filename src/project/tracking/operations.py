"""How many operations a training step is made of, and what an operation costs here, however small it is."""

from __future__ import annotations

import time

import torch
from torch import Tensor

MANY = 100_000  # where counting ends


def count_operations(loss: Tensor) -> int:
    """Differentiable operations behind a loss: nodes of its graph, without those that only store gradients.

    About a microsecond each; a compiled net is one.
    """
    if loss.grad_fn is None:
        return 0
    seen, stack = {loss.grad_fn}, [loss.grad_fn]
    number = 0
    while stack and number < MANY:
        node = stack.pop()
        number += not node.name().endswith("AccumulateGrad")
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return number


def operation_cost_us(length: int = 100, repeats: int = 15) -> float:
    """Microseconds that forward and backward of the smallest operation take on the host, measured in some 10 ms.

    Whatever time a step's operations take beyond this is computing. It is the mean, since a step too has to share the
    cores with what else runs here.
    """
    with torch.enable_grad():
        start = time.perf_counter()
        for _ in range(repeats):
            y = torch.ones(1, requires_grad=True)
            for _ in range(length):
                y = y * 1.0
            y.backward()  # type: ignore[no-untyped-call]
        return 1e6 * (time.perf_counter() - start) / (length * repeats)
