"""How many operations a training step is made of, and what an operation costs here, however small it is."""

from __future__ import annotations

import math
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


class OperationCost:
    """What the smallest operation takes on the host, forward and backward: whatever more a step's take is computing.

    A hundred are timed in each of ``STEPS`` steps, a millisecond at a time, and the mean counts: a step has to share
    the cores with what else runs here, now more and now less, and so do these.

    Attributes:
        us: Microseconds an operation, nan before the first is timed.
    """

    STEPS, LENGTH = 15, 100

    def __init__(self) -> None:
        self._us: list[float] = []

    @property
    def us(self) -> float:
        return sum(self._us) / len(self._us) if self._us else math.nan

    @property
    def is_known(self) -> bool:
        return len(self._us) == self.STEPS

    def measure(self) -> None:
        with torch.enable_grad():
            start = time.perf_counter()
            y = torch.ones(1, requires_grad=True)
            for _ in range(self.LENGTH):
                y = y * 1.0
            y.backward()  # type: ignore[no-untyped-call]
            self._us.append(1e6 * (time.perf_counter() - start) / self.LENGTH)
