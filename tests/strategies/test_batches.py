"""Parts of a batch, and one output of theirs."""

import dataclasses
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from project.batch import batch_length
from project.errors import UserError
from project.strategies.batches import chunks, gather, share

CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class Sample:
    x: Tensor
    tags: list[str]


Pair = namedtuple("Pair", "left right")


@pytest.mark.parametrize("length", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "structure",
    [
        lambda x, tags: x,
        lambda x, tags: [x, tags],  # as default_collate makes of pairs
        lambda x, tags: [x, x + 1],
        lambda x, tags: [x, x + 1, tags],
        lambda x, tags: (x, {"tags": tags, "more": (x, "text", 3)}),
        lambda x, tags: OrderedDict(x=x, tags=tags),
        lambda x, tags: Sample(x, tags),
        lambda x, tags: Pair(x, Pair(tags, None)),
        lambda x, tags: (x, [torch.ones(1 + i + 9 * i) for i in range(len(x))]),  # one tensor per sample
        lambda x, tags: tags,
    ],
)
def test_what_is_split_is_joined_again(length: int, replicas: int, structure: Callable[..., Any]) -> None:
    value = structure(torch.arange(length * 2.0).reshape(length, 2), [f"tag{i}" for i in range(length)])
    assert batch_length(value) == length
    rows = chunks(length, replicas)
    shares = [share(value, length, part, CPU) for part in rows]
    lengths = [batch_length(part) for part in shares]
    assert lengths == [len(part) for part in torch.arange(length).chunk(replicas)]
    joined = gather(shares, lengths, CPU, "net")  # type: ignore[arg-type]
    assert type(joined) is type(value)
    assert repr(joined) == repr(value)


@pytest.mark.parametrize(
    ("outputs", "says"),
    [
        ([torch.tensor(1.0), torch.tensor(2.0)], "net returned a tensor without dimensions.*compute it outside"),
        ([{"loss": torch.tensor(1.0)}] * 2, "net: loss returned a tensor without dimensions"),
        ([torch.ones(2, 5), torch.ones(2, 6)], r"shape \(2, 5\), shape \(2, 6\)"),
        ([0.5, 0.25], "0.5, 0.25"),
        ([None, torch.ones(1)], "NoneType, Tensor"),
        ([{"a": None}, {"b": None}], r"keys \['a'\], keys \['b'\]"),
    ],
)
def test_outputs_that_cannot_be_joined_are_refused(outputs: list[Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        gather(outputs, [2, 2], CPU, "net")
