"""Where nets are cut into stages."""

from typing import Any

import pytest
import torch
from torch import nn

from project.errors import UserError
from project.models.nets import GPT, MLP, ResidualCNN, ViT
from project.models.plan import ParallelPlan
from project.strategies.stages import chain_of, refuse_tied_weights, split

IMAGES = torch.linspace(-1, 1, 3 * 64).reshape(3, 1, 8, 8)
TOKENS = torch.arange(24).reshape(3, 8)
NETS: dict[str, Any] = {
    "mlp": lambda: (MLP([1, 8, 8], 10, width=16, depth=3), IMAGES),
    "cnn": lambda: (ResidualCNN([1, 8, 8], 10, width=4, blocks=3), IMAGES),
    "vit": lambda: (ViT([1, 8, 8], 10, width=16, depth=3, heads=2), IMAGES),
    "gpt": lambda: (GPT(50, 8, width=16, depth=3, heads=2), TOKENS),
    "gpt_learned": lambda: (GPT(50, 8, width=16, depth=2, heads=2, positions="learned"), TOKENS),
    "gpt_checkpointed": lambda: (GPT(50, 8, width=16, depth=2, heads=2, checkpoint_activations=True), TOKENS),
    "sequential": lambda: (nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.ReLU(), nn.Linear(4, 2)), IMAGES),
}


@pytest.mark.parametrize("net", NETS)
def test_parts_called_one_after_another_are_the_nets_forward(net: str) -> None:
    module, features = NETS[net]()
    module.eval()
    expected = module(features)
    for _, part in chain_of(module):
        features = part(features)
    assert torch.equal(features, expected)


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_stages_are_the_chain_in_order_and_none_is_empty(net: str, num_stages: int) -> None:
    parts = chain_of(NETS[net]()[0])
    stages = split(parts, num_stages)
    assert len(stages) == num_stages
    assert all(stages)
    assert [part for stage in stages for part in stage] == parts


def linear_chain(*widths: int) -> list[tuple[str, nn.Module]]:
    return [(str(number), nn.Linear(width, 1, bias=False)) for number, width in enumerate(widths)]


@pytest.mark.parametrize(
    ("widths", "num_stages", "expected"),
    [
        ([1, 1, 1, 1], 2, [2, 2]),
        ([5, 1, 1, 1, 1, 1], 2, [1, 5]),
        ([1, 1, 1, 9], 2, [3, 1]),
        ([1, 1, 1, 9], 4, [1, 1, 1, 1]),
        ([2, 2, 2, 2, 2, 2, 3], 3, [2, 3, 2]),
        ([7], 1, [1]),
    ],
)
def test_stages_hold_about_equal_bytes(widths: list[int], num_stages: int, expected: list[int]) -> None:
    assert [len(stage) for stage in split(linear_chain(*widths), num_stages)] == expected


def test_boundaries_say_where_stages_begin() -> None:
    stages = split(linear_chain(1, 1, 1, 1, 1), 3, boundaries=["1", "4"])
    assert [[name for name, _ in stage] for stage in stages] == [["0"], ["1", "2", "3"], ["4"]]


@pytest.mark.parametrize(
    ("num_stages", "boundaries", "advice"),
    [
        (6, None, "type trainer.devices=5"),
        (2, ["one"], "not among the parts of the net's chain (0, 1, 2, 3, 4)"),
        (3, ["1"], "name the 2 parts"),
        (3, ["3", "1"], "in their order"),
        (2, ["0"], "name the 1 parts"),
    ],
)
def test_impossible_cuts_are_refused(num_stages: int, boundaries: list[str] | None, advice: str) -> None:
    with pytest.raises(UserError) as info:
        split(linear_chain(1, 1, 1, 1, 1), num_stages, boundaries)
    assert advice in str(info.value)


class Net(nn.Module):
    def __init__(self, chain: tuple[str, ...]) -> None:
        super().__init__()
        self.body = nn.Linear(2, 2)
        self.head = nn.Linear(2, 2)
        self.parallel_plan = ParallelPlan(chain=chain)


@pytest.mark.parametrize(
    ("net", "told"),
    [
        (Net(()), "give it a parallel_plan with a chain"),
        (nn.Linear(2, 2), "give it a parallel_plan with a chain"),
        (Net(("body",)), "head.weight in none of its parts"),
        (Net(("body", "head", "body")), "body.weight in both body and body"),
        (Net(("body", "haed")), "did you mean head?"),
    ],
)
def test_net_without_a_right_chain_is_refused(net: nn.Module, told: str) -> None:
    with pytest.raises(UserError) as info:
        chain_of(net)
    assert told in str(info.value)


def test_weights_tied_over_two_stages_are_refused_and_within_one_are_not() -> None:
    tied = chain_of(GPT(50, 8, width=16, depth=2, heads=2))
    refuse_tied_weights([tied])
    with pytest.raises(UserError, match=r"head\.weight are one tensor, .*tie_weights=false, .*fsdp \(ddp where two"):
        refuse_tied_weights(split(tied, 2))
    refuse_tied_weights(split(chain_of(GPT(50, 8, width=16, depth=2, heads=2, tie_weights=False)), 4))
