"""How many samples a batch holds, whatever it is made of."""

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from project.batch import batch_length, num_samples


@dataclass
class Pair:
    left: Tensor
    right: Tensor


@pytest.mark.parametrize(
    ("batch", "length"),
    [
        (torch.zeros(4, 2), 4),
        (torch.tensor(1.0), 1),
        ({"image": torch.zeros(5, 1), "label": torch.zeros(5)}, 5),
        ((torch.zeros(3), torch.zeros(3)), 3),
        ([{"x": torch.zeros(2)}, 1], 2),
        ({"name": ["a", "b", "c"], "image": torch.zeros(3, 2)}, 3),
        ([("a", "b"), torch.zeros(2)], 2),
        ({"meta": {}, "image": torch.zeros(6)}, 6),
        (UserDict(tokens=torch.zeros(7, 3)), 7),  # as tokenizers make
        (Pair(torch.zeros(8), torch.zeros(8)), 8),
        (([torch.zeros(9, 3), torch.zeros(5, 3)], [{"box": torch.zeros(1)}, {"box": torch.zeros(2)}]), 2),
        (["a", "b"], 2),
        ("text", 1),
        ({}, 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_batch_is_as_long_as_its_first_tensor_or_list_of_samples(batch: Any, length: int) -> None:
    assert num_samples(batch) == length


def test_samples_of_different_lengths_are_no_batch_dimension() -> None:
    assert batch_length([torch.ones(4), torch.ones(2), torch.ones(7)]) == 3
    assert batch_length([{"x": torch.ones(4)}, {"x": torch.ones(4)}]) == 2
    assert batch_length((["a", "b"], torch.ones(5, 2))) == 5
    assert batch_length((3, "text", torch.ones(()))) is None
